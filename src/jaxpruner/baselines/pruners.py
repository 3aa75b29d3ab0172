"""From the name of an algorithm, a sparsity and a recipe to an updater, through the library's registry.

The target of every layer is found before anything is compiled and enters the program as an array, so that one program
serves every sparsity.
"""

from typing import Any

import jax

from jaxpruner import algorithms, api, base_updater, sparsity_distributions
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_distributions import FilterFn

DENSE = 'no_prune'
_TRAINERS = algorithms.StaticRandomSparse, algorithms.SET, algorithms.RigL
_AT_TARGET = *_TRAINERS, algorithms.ACDC  # whose masks are at the target whenever they are sparse
_STRAIGHT_THROUGH = algorithms.SteMagnitudePruning, algorithms.SteRandomPruning
_DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}


def check_algorithm(name: str) -> None:
    """Refuses a name that no algorithm has.

    Args:
      name: of an algorithm.

    Raises:
      ValueError: nobody registered it.

    >>> check_algorithm('rigl')
    """
    if name not in api.ALGORITHM_REGISTRY:
        raise ValueError(
            f'algorithm {name!r} is unknown; {tree_lib.nearest(name, api.all_algorithm_names())}'
        )


def target_sparsities(
    params: Any, algorithm: str, sparsity: float, recipe: Recipe, filter_fn: FilterFn
) -> Any:
    """The sparsity that each leaf is to reach.

    Args:
      params: the parameters, or their shapes.
      algorithm: its name.
      sparsity: over all leaves that may be pruned, in [0, 1].
      recipe: its section `pruning` names the distribution.
      filter_fn: (path, leaf) -> whether it may be pruned.

    Returns:
      A tree like the parameters of floats, `None` where a leaf stays dense.

    Raises:
      ValueError: a sparsity outside [0, 1], an unknown distribution or algorithm.

    >>> shapes = {'kernel': jax.ShapeDtypeStruct((4, 4), 'float32'), 'bias': jax.ShapeDtypeStruct((4,), 'float32')}
    >>> target_sparsities(shapes, 'magnitude', 0.5, Recipe('resnet'), sparsity_distributions.NOT_DIM_ONE_FILTER)
    {'bias': None, 'kernel': 0.5}
    """
    check_algorithm(algorithm)
    name = recipe.pruning.distribution
    if name not in _DISTRIBUTIONS:
        raise ValueError(
            f'pruning.distribution {name!r} is unknown; {tree_lib.nearest(name, _DISTRIBUTIONS)}'
        )
    targets = _DISTRIBUTIONS[name](params, sparsity, filter_fn=filter_fn)
    return (
        jax.tree.map(lambda _: None, params) if algorithm == DENSE else jax.tree.map(float, targets)
    )


def make_updater(
    algorithm: str, targets: Any, recipe: Recipe, seed: Any = 0
) -> base_updater.BaseUpdater:
    """The updater of an algorithm, with the recipe's schedule.

    Args:
      algorithm: its name.
      targets: a tree like the parameters of sparsities (floats, or traced scalars), `None` where dense.
      recipe: its section `pruning`.
      seed: of random masks: a whole number or a key, traced or not.

    Raises:
      ValueError: an unknown algorithm, or numbers that do not fit.

    >>> make_updater('rigl', {'kernel': 0.5}, Recipe('resnet', steps=100)).scheduler
    PolynomialSchedule(update_freq=2, update_start_step=0, update_end_step=75, power=3.0)
    >>> make_updater('magnitude', {'kernel': 0.5}, Recipe('resnet', steps=100)).scheduler
    PolynomialSchedule(update_freq=2, update_start_step=20, update_end_step=74, power=3.0)
    """
    check_algorithm(algorithm)
    start, end = _interval(algorithm, recipe)
    frequency = max(1, recipe.share(recipe.pruning.frequency))
    # The target is reached at the last update: one that falls before the end would leave the masks short of it.
    if not issubclass(api.ALGORITHM_REGISTRY[algorithm], _AT_TARGET):
        end = max(start, end // frequency * frequency)
    return api.create_updater_from_config(
        {
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


def _interval(algorithm: str, recipe: Recipe) -> tuple[int, int]:
    """The first and the last step at which masks may be updated."""
    kind, pruning = api.ALGORITHM_REGISTRY[algorithm], recipe.pruning
    if issubclass(kind, _TRAINERS):
        start, end, names = pruning.trainer_start, pruning.trainer_end, 'trainer_start, trainer_end'
    elif issubclass(kind, _STRAIGHT_THROUGH):
        start, end, names = pruning.ste_start, pruning.ste_end, 'ste_start, ste_end'
    else:
        start, end, names = pruning.start, pruning.end, 'start, end'
    if end < start:
        raise ValueError(f'pruning.{names}: the end {end} lies before the start {start}')
    return recipe.share(start), recipe.share(end)
