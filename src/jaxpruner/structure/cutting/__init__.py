"""Makes smaller arrays, a smaller program, and a file of what is kept.

Take `relu(x @ up + bias) @ down` with 8 hidden units, and keep two of them: `{'up[1]': [0, 3]}`.

    keep      is checked: the group `up[1]` exists, is exact, and has channels 0 and 3
    cut       the atom of the group keeps its indices 0 and 3, wherever it occurs
    arrays    `up[:, [0, 3]]`, `bias[[0, 3]]` and `down[[0, 3], :]`; moments of Adam likewise, and masks
    program   each equation of the trace runs on the smaller arrays; `bias` is repeated to shape (5, 2) instead of
              (5, 8)
    verify    the results equal those of the whole model with zeros for the other six units

If the 8 channels are 2 heads of 4 features, and features 0 and 3 of each head stay, then the cut keeps the positions 0,
3, 4 and 7 along the axis of 8.
"""
