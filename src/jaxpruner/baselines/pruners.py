"""From an algorithm's name, a sparsity and a recipe to a pruner, through the library's registry.

The target of each leaf is computed before compilation and enters the program as an array, so that
one program serves every sparsity.
"""

from typing import Any

import jax

from jaxpruner import algorithms, api, base_updater, sparsity_distributions
from jaxpruner import tree as tree_lib
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.sparsity_distributions import FilterFn

DENSE = 'no_prune'
_TRAINERS = algorithms.StaticRandomSparse, algorithms.SET, algorithms.RigL
# Their masks are at the target whenever they are sparse.
_AT_TARGET = (*_TRAINERS, algorithms.ACDC)
_STRAIGHT_THROUGH = algorithms.SteMagnitudePruning, algorithms.SteRandomPruning
_DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}


def check_algorithm(name: str) -> None:
    """Raises a `ValueError` for a name that no algorithm has."""
    if name not in api.ALGORITHM_REGISTRY:
        nearest = tree_lib.nearest(name, api.all_algorithm_names())
        raise ValueError(f'algorithm {name!r} is unknown; {nearest}')


def target_sparsities(
    params: Any, algorithm: str, sparsity: float, recipe: Recipe, filter_fn: FilterFn
) -> Any:
    """The sparsity that each leaf is to reach, by the recipe's distribution: `None` where dense.

    >>> shapes = {'kernel': jax.ShapeDtypeStruct((4, 4), 'float32')}
    >>> shapes['bias'] = jax.ShapeDtypeStruct((4,), 'float32')
    >>> not_bias = sparsity_distributions.NOT_DIM_ONE_FILTER
    >>> target_sparsities(shapes, 'magnitude', 0.5, Recipe('resnet'), not_bias)
    {'bias': None, 'kernel': 0.5}
    """
    check_algorithm(algorithm)
    name = recipe.pruning.distribution
    if name not in _DISTRIBUTIONS:
        nearest = tree_lib.nearest(name, _DISTRIBUTIONS)
        raise ValueError(f'pruning.distribution {name!r} is unknown; {nearest}')
    targets = _DISTRIBUTIONS[name](params, sparsity, filter_fn=filter_fn)
    if algorithm == DENSE:
        return jax.tree.map(lambda _: None, params)
    return jax.tree.map(float, targets)


def make_updater(
    algorithm: str, targets: Any, recipe: Recipe, seed: Any = 0
) -> base_updater.BaseUpdater:
    """The pruner of an algorithm, with the recipe's schedule.

    `targets` is a tree like the parameters of floats or traced scalars, `None` where dense; `seed`
    may be a traced key.
    """
    check_algorithm(algorithm)
    start, end = _update_interval(algorithm, recipe)
    frequency = max(1, recipe.share(recipe.pruning.frequency))
    # The last update reaches the target; so the end must be a step with an update.
    if not issubclass(api.ALGORITHM_REGISTRY[algorithm], _AT_TARGET):
        end = max(start, end // frequency * frequency)
    return api.create_updater_from_config(
        {
            **recipe.pruning.own,
            'algorithm': algorithm,
            'sparsity_distribution_fn': lambda params: targets,
            'update_freq': frequency,
            'update_start_step': start,
            'update_end_step': end,
            'power': recipe.pruning.power,
            'drop_fraction': recipe.pruning.drop_fraction,
            'sparsity_type': recipe.pruning.sparsity_type,
            'rng_seed': seed,
        }
    )


def _update_interval(algorithm: str, recipe: Recipe) -> tuple[int, int]:
    """The first and the last step at which masks may be updated."""
    updater_class = api.ALGORITHM_REGISTRY[algorithm]
    pruning = recipe.pruning
    if issubclass(updater_class, _TRAINERS):
        start = pruning.trainer_start
        end = pruning.trainer_end
        names = 'trainer_start, trainer_end'
    elif issubclass(updater_class, _STRAIGHT_THROUGH):
        start = pruning.ste_start
        end = pruning.ste_end
        names = 'ste_start, ste_end'
    else:
        start = pruning.start
        end = pruning.end
        names = 'start, end'
    if end < start:
        raise ValueError(f'pruning.{names}: the end {end} lies before the start {start}')
    return recipe.share(start), recipe.share(end)
