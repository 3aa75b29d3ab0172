"""One file for each family of algorithms; a new one is a file here, its import, and its name in configurations."""

from jaxpruner.algorithms import pruners as pruners
from jaxpruner.algorithms.acdc import ACDC as ACDC
from jaxpruner.algorithms.adam_fisher import AdamFisherPruning as AdamFisherPruning
from jaxpruner.algorithms.fixed_mask import FixedMask as FixedMask
from jaxpruner.algorithms.fixed_mask import masks_from_zeros as masks_from_zeros
from jaxpruner.algorithms.global_pruners import GlobalMagnitudePruning as GlobalMagnitudePruning
from jaxpruner.algorithms.global_pruners import GlobalPruningMixin as GlobalPruningMixin
from jaxpruner.algorithms.global_pruners import GlobalSaliencyPruning as GlobalSaliencyPruning
from jaxpruner.algorithms.iterative_nm import IterativeNMPruning as IterativeNMPruning
from jaxpruner.algorithms.movement import MovementPruning as MovementPruning
from jaxpruner.algorithms.pruners import MagnitudePruning as MagnitudePruning
from jaxpruner.algorithms.pruners import RandomPruning as RandomPruning
from jaxpruner.algorithms.pruners import SaliencyPruning as SaliencyPruning
from jaxpruner.algorithms.sparse_trainers import SET as SET
from jaxpruner.algorithms.sparse_trainers import RigL as RigL
from jaxpruner.algorithms.sparse_trainers import StaticRandomSparse as StaticRandomSparse
from jaxpruner.algorithms.ste import SteMagnitudePruning as SteMagnitudePruning
from jaxpruner.algorithms.ste import SteMixin as SteMixin
from jaxpruner.algorithms.ste import SteRandomPruning as SteRandomPruning
from jaxpruner.base_updater import BaseUpdater as _BaseUpdater
from jaxpruner.base_updater import NoPruning as _NoPruning

# The name of each algorithm in configurations.
ALGORITHM_REGISTRY: dict[str, type[_BaseUpdater]] = {
    'no_prune': _NoPruning,
    'magnitude': MagnitudePruning,
    'random': RandomPruning,
    'saliency': SaliencyPruning,
    'magnitude_ste': SteMagnitudePruning,
    'random_ste': SteRandomPruning,
    'global_magnitude': GlobalMagnitudePruning,
    'global_saliency': GlobalSaliencyPruning,
    'static_sparse': StaticRandomSparse,
    'set': SET,
    'rigl': RigL,
    'acdc': ACDC,
    'adam_fisher': AdamFisherPruning,
    'adam-fisher': AdamFisherPruning,
    'iterative_nm': IterativeNMPruning,
    'movement': MovementPruning,
}
