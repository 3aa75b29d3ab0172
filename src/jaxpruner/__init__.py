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

from jaxpruner import activations as activations
from jaxpruner import algorithms as algorithms
from jaxpruner import api as api
from jaxpruner import base_updater as base_updater
from jaxpruner import jax_pruning as jax_pruning
from jaxpruner import mask_calculator as mask_calculator
from jaxpruner import oneshot as oneshot
from jaxpruner import report as report
from jaxpruner import sparse as sparse
from jaxpruner import sparsity_distributions as sparsity_distributions
from jaxpruner import sparsity_schedules as sparsity_schedules
from jaxpruner import sparsity_types as sparsity_types
from jaxpruner import structure as structure
from jaxpruner import uses as uses
from jaxpruner import utils as utils
from jaxpruner.activations import prune_act_struct as prune_act_struct
from jaxpruner.activations import prune_act_unstruct as prune_act_unstruct
from jaxpruner.activations import pruning_act_struct as pruning_act_struct
from jaxpruner.activations import puning_act_unstruct as puning_act_unstruct
from jaxpruner.activations import sparsify_activations as sparsify_activations
from jaxpruner.activations import summarize_activations as summarize_activations
from jaxpruner.algorithms import ACDC as ACDC
from jaxpruner.algorithms import SET as SET
from jaxpruner.algorithms import AdamFisherPruning as AdamFisherPruning
from jaxpruner.algorithms import FixedMask as FixedMask
from jaxpruner.algorithms import GlobalMagnitudePruning as GlobalMagnitudePruning
from jaxpruner.algorithms import GlobalPruningMixin as GlobalPruningMixin
from jaxpruner.algorithms import GlobalSaliencyPruning as GlobalSaliencyPruning
from jaxpruner.algorithms import IterativeNMPruning as IterativeNMPruning
from jaxpruner.algorithms import MagnitudePruning as MagnitudePruning
from jaxpruner.algorithms import MovementPruning as MovementPruning
from jaxpruner.algorithms import RandomPruning as RandomPruning
from jaxpruner.algorithms import RigL as RigL
from jaxpruner.algorithms import SaliencyPruning as SaliencyPruning
from jaxpruner.algorithms import StaticRandomSparse as StaticRandomSparse
from jaxpruner.algorithms import SteMagnitudePruning as SteMagnitudePruning
from jaxpruner.algorithms import SteMixin as SteMixin
from jaxpruner.algorithms import SteRandomPruning as SteRandomPruning
from jaxpruner.algorithms import masks_from_zeros as masks_from_zeros
from jaxpruner.algorithms import pruners as pruners
from jaxpruner.api import ALGORITHM_REGISTRY as ALGORITHM_REGISTRY
from jaxpruner.api import all_algorithm_names as all_algorithm_names
from jaxpruner.api import create_updater_from_config as create_updater_from_config
from jaxpruner.api import register_algorithm as register_algorithm
from jaxpruner.base_updater import BaseUpdater as BaseUpdater
from jaxpruner.base_updater import NoPruning as NoPruning
from jaxpruner.base_updater import apply_mask as apply_mask
from jaxpruner.jax_pruning import PruningStrategy as PruningStrategy
from jaxpruner.jax_pruning import StrategyPruning as StrategyPruning
from jaxpruner.jax_pruning import gradual_strategy as gradual_strategy
from jaxpruner.jax_pruning import pruning as pruning
from jaxpruner.jax_pruning import pruning_apply as pruning_apply
from jaxpruner.oneshot import plan as plan
from jaxpruner.oneshot import prune as prune
from jaxpruner.saving import SmallModel as SmallModel
from jaxpruner.saving import load_small_model as load_small_model
from jaxpruner.saving import save_safetensors as save_safetensors
from jaxpruner.saving import save_small_model as save_small_model
from jaxpruner.sparse_state import SparseState as SparseState
from jaxpruner.sparse_state import sparse_states as sparse_states
from jaxpruner.sparse_state import unpack_masks as unpack_masks
from jaxpruner.sparsity_schedules import NoUpdateSchedule as NoUpdateSchedule
from jaxpruner.sparsity_schedules import OneShotSchedule as OneShotSchedule
from jaxpruner.sparsity_schedules import PeriodicSchedule as PeriodicSchedule
from jaxpruner.sparsity_schedules import PolynomialSchedule as PolynomialSchedule
from jaxpruner.sparsity_types import Block as Block
from jaxpruner.sparsity_types import Channel as Channel
from jaxpruner.sparsity_types import NByM as NByM
from jaxpruner.sparsity_types import SparsityType as SparsityType
from jaxpruner.sparsity_types import Unstructured as Unstructured
from jaxpruner.sparsity_types import register_sparsity_type as register_sparsity_type
from jaxpruner.structure import ChannelGraph as ChannelGraph
from jaxpruner.structure import channel_groups as channel_groups
from jaxpruner.structure import shrink as shrink
from jaxpruner.tabulation import tabulate as tabulate
from jaxpruner.uses import UnsupportedPrimitive as UnsupportedPrimitive
from jaxpruner.uses import Use as Use
from jaxpruner.uses import UseGraph as UseGraph
from jaxpruner.uses import param_uses as param_uses
from jaxpruner.utils import sparsity_metrics as sparsity_metrics
from jaxpruner.utils import summarize_intersection as summarize_intersection
from jaxpruner.utils import summarize_sparsity as summarize_sparsity


def __getattr__(name):
    if name == '__version__':  # a checkout that is not installed has none
        from importlib import metadata

        return metadata.version(__name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
