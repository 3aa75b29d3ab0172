"""Scores and budgets: which channels stay.

Take `relu(x @ up + bias) @ down` with 4 hidden units, and the budget `'flops=0.5'`. By magnitude the members of the
group say of its channels

    up      each channel sums the magnitudes of its column    4   6   8  10    over the mean, 7    0.57 0.86 1.14 1.43
    bias    of its element                                    0   0   0   0    zeros stay          0    0    0    0
    down    of its row                                        1   1   1   1    over the mean, 1    1    1    1    1

and the scores are the sums of the right columns, 1.57, 1.86, 2.14 and 2.43. The channel of the lowest score goes first.
The operations of both products are proportional to the number of units. So two units have to go, and units 2 and 3
stay.
"""
