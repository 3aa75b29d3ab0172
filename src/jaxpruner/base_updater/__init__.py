"""The base of all algorithms, and the step that it makes of an optimizer."""

from jaxpruner.base_updater.no_pruning import NoPruning as NoPruning
from jaxpruner.base_updater.updater import BaseUpdater as BaseUpdater
from jaxpruner.base_updater.updater import DistributionFn as DistributionFn
from jaxpruner.core.masking import apply_mask as apply_mask
from jaxpruner.core.sparse_state import SparseState as SparseState
