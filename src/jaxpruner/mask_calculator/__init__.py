"""Scores become masks: one function for each sparsity type, and what they are made of.

From a model down to a threshold, each function calls the next:

    create_masks            of an updater: a tree of scores
    → select_leaves         sets leaves of N:M and those of a user's own `topk_fn` apart
    → best_groups           pools scores over groups, counts how many to keep, spreads the masks of the groups
    → keep_largest_each     leaves become arrays of rows
    → row_by_row.select     thresholds, ties and masks, row by row, on one CPU device
    → search.select         the same elsewhere, in passes over all rows

A ranking over the whole model goes by `keep_largest_jointly` to `search.select`.
"""

from jaxpruner.mask_calculator.calculators import MASK_DTYPE as MASK_DTYPE
from jaxpruner.mask_calculator.calculators import TopkFn as TopkFn
from jaxpruner.mask_calculator.calculators import TopkFnType as TopkFnType
from jaxpruner.mask_calculator.calculators import (
    _topk_mask_calculator_internal as _topk_mask_calculator_internal,
)
from jaxpruner.mask_calculator.calculators import get_topk_fn as get_topk_fn
from jaxpruner.mask_calculator.calculators import (
    topk_block_mask_calculator as topk_block_mask_calculator,
)
from jaxpruner.mask_calculator.calculators import (
    topk_channel_mask_calculator as topk_channel_mask_calculator,
)
from jaxpruner.mask_calculator.calculators import (
    topk_group_mask_calculator as topk_group_mask_calculator,
)
from jaxpruner.mask_calculator.calculators import topk_mask_calculator as topk_mask_calculator
from jaxpruner.mask_calculator.calculators import (
    topk_n_by_m_mask_calculator as topk_n_by_m_mask_calculator,
)
