"""Scores become masks: one function for each sparsity type, and what they are made of."""

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
