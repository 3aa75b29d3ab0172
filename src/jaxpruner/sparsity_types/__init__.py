"""Which sets of weights are removed together: single weights, N of M, blocks, channels.

A type that pools scores over groups of weights and spreads the groups' verdicts back is all that is needed: counting
and selecting is the same for all (`mask_calculator`). N:M ranks inside its groups instead. Strings are read once, by
`parse_sparsity_type`; array code sees only the validated objects. `register_sparsity_type` adds strings of one's own.
"""

from jaxpruner.sparsity_types.base import GroupedType as GroupedType
from jaxpruner.sparsity_types.base import SparsityType as SparsityType
from jaxpruner.sparsity_types.base import Unstructured as Unstructured
from jaxpruner.sparsity_types.base import is_sparsity_type as is_sparsity_type
from jaxpruner.sparsity_types.base import is_unstructured as is_unstructured
from jaxpruner.sparsity_types.block import Block as Block
from jaxpruner.sparsity_types.channel import Channel as Channel
from jaxpruner.sparsity_types.n_by_m import INPUT_AXIS as INPUT_AXIS
from jaxpruner.sparsity_types.n_by_m import NByM as NByM
from jaxpruner.sparsity_types.n_by_m import parse_n_by_m as parse_n_by_m
from jaxpruner.sparsity_types.parsing import parse_sparsity_type as parse_sparsity_type
from jaxpruner.sparsity_types.parsing import register_sparsity_type as register_sparsity_type
