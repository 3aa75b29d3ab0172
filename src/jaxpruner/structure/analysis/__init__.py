"""Finds which channels of a traced model belong together, and which can be removed.

Take a model of two layers for 5 samples, with 8 hidden units:

    hidden = x @ up + bias           up has shape (3, 8), bias (8,)
    result = relu(hidden) @ down     down has shape (8, 2)

Which channels belong together? Each axis begins as an atom of its own. The first product makes the last axis of
`hidden` the same as that of `up`. The sum makes it the same as that of `bias`, and the second product the same as the
first of `down`. So `up[1]`, `bias[0]` and `down[0]` become one atom of size 8, a group. The 3 inputs and the 2 results
are pinned, since callers of the model rely on them.

Which can be removed? Let unit 5 be zero in all members of its group. Then `hidden` is zero there, and so is
`relu(hidden)`. The sum over units in the second product gets nothing from unit 5. So removing the unit is the same as
zeroing it: the group is exact. With a softmax over the hidden units it would not be exact. A zeroed unit still adds
`exp(0) = 1` to the sum by which the softmax divides.
"""
