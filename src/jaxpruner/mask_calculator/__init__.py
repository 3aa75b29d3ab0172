"""Scores become masks: one function for each sparsity type, and what they are made of.

Read `selection/by_counting.py` first: it finds the largest scores of an array in the simplest way.

From a model down to a threshold, each function may call the next; skip the lines that do not apply:

    create_masks, select_masks       of a pruner: a tree of scores
    joint_leaves.mask_joint_leaves   leaves that a type ties are ranked as the groups that they share
    calculators.mask_leaves          sets leaves of N:M, and a user's own `topk_fn`, apart
    _mask_by_groups                  the types that rank groups; `topk_mask_calculator` and others begin here

    inside a traced program                         eagerly
    _mask_in_one_program: all leaves at once        _mask_alone: one leaf, padded to one of few lengths

    selection.keep_largest_each      leaves become arrays of rows
    _select_in_one_dtype             chooses between two ways

    on one CPU, or one device with a single row     elsewhere, and for many short rows
    row_by_row.select: one row after another        passes.select: passes over all rows

    search.find_cut                  the thresholds of a ranking
    masks                            which ties are kept, and the mask

A ranking over the whole model goes by `selection.keep_largest_jointly` to `passes.select`.
"""

from jaxpruner.mask_calculator.calculators import MASK_DTYPE as MASK_DTYPE
from jaxpruner.mask_calculator.calculators import LeafMask as LeafMask
from jaxpruner.mask_calculator.calculators import ScoredLeaf as ScoredLeaf
from jaxpruner.mask_calculator.calculators import TopkFn as TopkFn
from jaxpruner.mask_calculator.calculators import TopkFnType as TopkFnType
from jaxpruner.mask_calculator.calculators import TopkOfType as TopkOfType
from jaxpruner.mask_calculator.calculators import (
    _topk_mask_calculator_internal as _topk_mask_calculator_internal,
)
from jaxpruner.mask_calculator.calculators import check_scores as check_scores
from jaxpruner.mask_calculator.calculators import get_topk_fn as get_topk_fn
from jaxpruner.mask_calculator.calculators import own_topk_fn as own_topk_fn
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
from jaxpruner.mask_calculator.joint_leaves import kept_weights as kept_weights
from jaxpruner.mask_calculator.joint_leaves import mask_joint_leaves as mask_leaves  # noqa: F401
from jaxpruner.mask_calculator.joint_leaves import with_targets as with_targets
from jaxpruner.mask_calculator.replacement import MaskedLeaf as MaskedLeaf
from jaxpruner.mask_calculator.replacement import drop_and_grow as drop_and_grow
from jaxpruner.mask_calculator.selection import number_to_keep as number_to_keep
from jaxpruner.mask_calculator.selection import number_to_keep_on_host as number_to_keep_on_host
