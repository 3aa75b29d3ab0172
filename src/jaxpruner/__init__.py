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

# Public are the names in `public_names.py` and what `algorithms` exports. They are loaded when one of them is first
# asked for, so that the command line answers `--help` without loading JAX.

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpruner.algorithms import *  # noqa: F403 (what a type checker sees)
    from jaxpruner.public_names import *  # noqa: F403
else:

    def _public_names():
        from importlib import import_module
        from types import ModuleType

        algorithms = vars(import_module(f'{__name__}.algorithms'))
        classes = {
            name: value for name, value in algorithms.items() if not isinstance(value, ModuleType)
        }
        names = classes | vars(import_module(f'{__name__}.public_names'))
        return {name: value for name, value in names.items() if not name.startswith('_')}

    def _order(entry):
        """Pruners first, then functions, other classes, constants and modules, each by name."""
        from inspect import isclass, isfunction, ismodule

        name, value = entry
        is_pruner = isclass(value) and hasattr(value, 'wrap_optax')
        is_constant = not (isclass(value) or isfunction(value) or ismodule(value))
        return not is_pruner, ismodule(value), is_constant, isclass(value), name.lower()

    def __getattr__(name):
        """Finds a module of the package, or a public name."""
        from importlib import import_module, util

        if name == '__version__':
            return import_module('importlib.metadata').version(__name__)
        is_special = name.startswith('__') and name != '__all__'
        if (
            not is_special
            and name.isidentifier()
            and util.find_spec(f'{__name__}.{name}') is not None
        ):
            return import_module(f'{__name__}.{name}')
        public = {} if is_special else _public_names()
        if name == '__all__':
            return [name for name, _ in sorted(public.items(), key=_order)]
        if name not in public:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        for public_name, value in public.items():
            globals().setdefault(public_name, value)  # what somebody assigned stays
        return public[name]

    def __dir__():
        special = [name for name in globals() if name.startswith('__') and name.endswith('__')]
        return [*__getattr__('__all__'), '__all__', '__version__', *special]
