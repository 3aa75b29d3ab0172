"""Sparsity for JAX models: masks, schedules, selection, training, one-shot pruning.

    pruner = jaxpruner.RigL(sparsity=0.9, scheduler=jaxpruner.PeriodicSchedule(update_freq=100))
    tx = pruner.wrap_optax(optax.adam(1e-3))

Pruners, which wrap an optax optimizer:
    at a schedule: MagnitudePruning, SaliencyPruning, RandomPruning, AdamFisherPruning, IterativeNMPruning
    one ranking over all layers: GlobalMagnitudePruning, GlobalSaliencyPruning
    sparse from the start: RigL, SET, StaticRandomSparse
    dense weights, sparse forward pass: SteMagnitudePruning, SteRandomPruning, MovementPruning
    sparse and dense phases: ACDC
    masks that are given: FixedMask, masks_from_zeros
    epoch strategies: StrategyPruning, PruningStrategy, gradual_strategy, pruning, pruning_apply
    none: NoPruning
    of one's own: BaseUpdater, GlobalPruningMixin, SteMixin, register_algorithm
Pruning a trained model once:
    prune, plan, apply_mask, unpack_masks, save_safetensors
When: PolynomialSchedule, PeriodicSchedule, OneShotSchedule, NoUpdateSchedule
Which weights together: Unstructured, NByM, Block, Channel, SparsityType, register_sparsity_type
From a configuration: create_updater_from_config, all_algorithm_names, ALGORITHM_REGISTRY
What a model holds: tabulate, sparsity_metrics, summarize_sparsity, summarize_intersection
Optimizer states: SparseState, sparse_states
Activations: sparsify_activations, summarize_activations, prune_act_unstruct, prune_act_struct, puning_act_unstruct,
    pruning_act_struct
How a model uses its parameters: param_uses, UseGraph, Use, UnsupportedPrimitive
Channels that can be removed: shrink, channel_groups, ChannelGraph, SmallModel, save_small_model, load_small_model
Modules: activations, algorithms, api, base_updater, jax_pruning, mask_calculator, oneshot, pruners, report,
    sparse, sparsity_distributions, sparsity_schedules, sparsity_types, structure, uses, utils

`help(jaxpruner.RigL)` explains a name, with an example.
"""

import importlib.metadata

from jaxpruner import (
    activations,
    algorithms,
    api,
    base_updater,
    jax_pruning,
    mask_calculator,
    oneshot,
    report,
    sparse,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
    structure,
    uses,
    utils,
)
from jaxpruner.activations import (
    prune_act_struct,
    prune_act_unstruct,
    pruning_act_struct,
    puning_act_unstruct,
    sparsify_activations,
    summarize_activations,
)
from jaxpruner.algorithms import (
    ACDC,
    SET,
    AdamFisherPruning,
    FixedMask,
    GlobalMagnitudePruning,
    GlobalPruningMixin,
    GlobalSaliencyPruning,
    IterativeNMPruning,
    MagnitudePruning,
    MovementPruning,
    RandomPruning,
    RigL,
    SaliencyPruning,
    StaticRandomSparse,
    SteMagnitudePruning,
    SteMixin,
    SteRandomPruning,
    masks_from_zeros,
    pruners,
)
from jaxpruner.api import (
    ALGORITHM_REGISTRY,
    all_algorithm_names,
    create_updater_from_config,
    register_algorithm,
)
from jaxpruner.base_updater import BaseUpdater, NoPruning, apply_mask
from jaxpruner.jax_pruning import (
    PruningStrategy,
    StrategyPruning,
    gradual_strategy,
    pruning,
    pruning_apply,
)
from jaxpruner.mask_metrics import sparsity_metrics
from jaxpruner.oneshot import plan, prune
from jaxpruner.saving import save_safetensors
from jaxpruner.small_models import SmallModel, load_small_model, save_small_model
from jaxpruner.sparse_state import SparseState, sparse_states, unpack_masks
from jaxpruner.sparsity_schedules import (
    NoUpdateSchedule,
    OneShotSchedule,
    PeriodicSchedule,
    PolynomialSchedule,
)
from jaxpruner.sparsity_types import (
    Block,
    Channel,
    NByM,
    SparsityType,
    Unstructured,
    register_sparsity_type,
)
from jaxpruner.structure import ChannelGraph, channel_groups, shrink
from jaxpruner.tabulation import tabulate
from jaxpruner.uses import UnsupportedPrimitive, Use, UseGraph, param_uses
from jaxpruner.utils import summarize_intersection, summarize_sparsity

# Pruners, functions, other classes, constants and modules, each by name.
__all__ = [  # noqa: RUF022
    'ACDC',
    'AdamFisherPruning',
    'BaseUpdater',
    'FixedMask',
    'GlobalMagnitudePruning',
    'GlobalSaliencyPruning',
    'IterativeNMPruning',
    'MagnitudePruning',
    'MovementPruning',
    'NoPruning',
    'RandomPruning',
    'RigL',
    'SaliencyPruning',
    'SET',
    'StaticRandomSparse',
    'SteMagnitudePruning',
    'SteRandomPruning',
    'StrategyPruning',
    'all_algorithm_names',
    'apply_mask',
    'channel_groups',
    'create_updater_from_config',
    'gradual_strategy',
    'load_small_model',
    'masks_from_zeros',
    'param_uses',
    'plan',
    'prune',
    'prune_act_struct',
    'prune_act_unstruct',
    'pruning',
    'pruning_act_struct',
    'pruning_apply',
    'puning_act_unstruct',
    'register_algorithm',
    'register_sparsity_type',
    'save_safetensors',
    'save_small_model',
    'shrink',
    'sparse_states',
    'sparsify_activations',
    'sparsity_metrics',
    'summarize_activations',
    'summarize_intersection',
    'summarize_sparsity',
    'tabulate',
    'unpack_masks',
    'Block',
    'Channel',
    'ChannelGraph',
    'GlobalPruningMixin',
    'NByM',
    'NoUpdateSchedule',
    'OneShotSchedule',
    'PeriodicSchedule',
    'PolynomialSchedule',
    'PruningStrategy',
    'SmallModel',
    'SparseState',
    'SparsityType',
    'SteMixin',
    'Unstructured',
    'UnsupportedPrimitive',
    'Use',
    'UseGraph',
    'ALGORITHM_REGISTRY',
    'activations',
    'algorithms',
    'api',
    'base_updater',
    'jax_pruning',
    'mask_calculator',
    'oneshot',
    'pruners',
    'report',
    'sparse',
    'sparsity_distributions',
    'sparsity_schedules',
    'sparsity_types',
    'structure',
    'uses',
    'utils',
]


def __getattr__(name):
    if name == '__version__':  # a checkout that is not installed has none
        return importlib.metadata.version(__name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
    special = [name for name in globals() if name.startswith('__') and name.endswith('__')]
    return [*__all__, '__version__', *special]
