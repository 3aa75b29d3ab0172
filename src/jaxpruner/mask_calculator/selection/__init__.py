"""Exact selection of the largest scores by counting, without sorting.

The number to keep goes in (`number_to_keep` computes it from a sparsity), and a mask comes out. A threshold lies
between two floats. Each pass over the scores counts how many reach some probes, and narrows the bracket. The search
stops as soon as exactly as many scores as are to be kept reach a threshold. Of equal scores at the threshold, those
before an index in flat order are kept. On a CPU the first probes come from a sample, or from the threshold of an
earlier selection. The result does not depend on them.

Order: NaN ranks lowest, -0.0 equals 0.0, of equal scores the one with the lower flat index is kept. On a CPU, XLA
compares denormal numbers (float32 and bfloat16 below 1.2e-38, float64 below 2.2e-308) as zero, so that these are ties
of zero; those of float16 are ranked. To rank bits instead would cost each pass several operations a score.

Read `by_counting` first: it is the whole selection in its simplest form. Then:

    largest                  requests, and which of two ways they go
    row_by_row               one device, on a CPU or with a single row: each row ends when its own count is right
    passes                   accelerators, several devices, many short rows, one ranking for all: passes over all arrays
    search                   both ways: first probes, and the threshold of a ranking
    brackets                 floats in their order, and how brackets of them are narrowed
    counting                 one pass over an array or a row
    masks                    which ties are kept, and the mask
    scores                   lazy scores, and the rows of arrays
    whole_numbers            how many to keep

`counts_over_devices` is for several devices only.
"""

from jaxpruner.mask_calculator.selection.counting import count_true as count_true
from jaxpruner.mask_calculator.selection.largest import Request as Request
from jaxpruner.mask_calculator.selection.largest import keep_largest as keep_largest
from jaxpruner.mask_calculator.selection.largest import keep_largest_each as keep_largest_each
from jaxpruner.mask_calculator.selection.largest import keep_largest_jointly as keep_largest_jointly
from jaxpruner.mask_calculator.selection.masks import Selected as Selected
from jaxpruner.mask_calculator.selection.scores import Scores as Scores
from jaxpruner.mask_calculator.selection.scores import read as read
from jaxpruner.mask_calculator.selection.whole_numbers import counter_for as counter_for
from jaxpruner.mask_calculator.selection.whole_numbers import number_to_keep as number_to_keep
from jaxpruner.mask_calculator.selection.whole_numbers import (
    number_to_keep_on_host as number_to_keep_on_host,
)
from jaxpruner.mask_calculator.selection.whole_numbers import numbers_to_keep as numbers_to_keep
from jaxpruner.mask_calculator.selection.whole_numbers import share_of as share_of
