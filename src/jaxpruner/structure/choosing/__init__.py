"""Scores and budgets: which channels stay.

Take `relu(x @ up + bias) @ down` with 4 hidden units, and the budget `'flops=0.5'`. Each member of the group scores the
4 channels by magnitude:

    up      sum of the magnitudes in a column     4   6   8  10    divided by the mean, 7    0.57 0.86 1.14 1.43
    bias    magnitude of an element               0   0   0   0    zeros stay                0    0    0    0
    down    sum of the magnitudes in a row        1   1   1   1    divided by the mean, 1    1    1    1    1

The scores of the channels are the sums of the last columns: 1.57, 1.86, 2.14 and 2.43. The channel with the lowest
score goes first. The operations of both products are proportional to the number of units. So two units have to go, and
units 2 and 3 stay.
"""
