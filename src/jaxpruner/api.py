"""From a name and a flat configuration to an updater."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxpruner import algorithms, config_files, sparsity_distributions, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms.sparse_trainers import check_drop_fraction
from jaxpruner.base_updater import BaseUpdater, NoPruning

ALGORITHM_REGISTRY: dict[str, type[BaseUpdater]] = {
    'no_prune': NoPruning,
    'magnitude': algorithms.MagnitudePruning,
    'random': algorithms.RandomPruning,
    'saliency': algorithms.SaliencyPruning,
    'magnitude_ste': algorithms.SteMagnitudePruning,
    'random_ste': algorithms.SteRandomPruning,
    'global_magnitude': algorithms.GlobalMagnitudePruning,
    'global_saliency': algorithms.GlobalSaliencyPruning,
    'static_sparse': algorithms.StaticRandomSparse,
    'set': algorithms.SET,
    'rigl': algorithms.RigL,
    'acdc': algorithms.ACDC,
    'adam_fisher': algorithms.AdamFisherPruning,
    'iterative_nm': algorithms.IterativeNMPruning,
    'movement': algorithms.MovementPruning,
}

# Algorithms that prune once and train nothing; the room that has them registers them.
ONE_SHOT_REGISTRY: dict[str, type[BaseUpdater]] = {}

_DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    'uniform': sparsity_distributions.uniform,
    'erk': sparsity_distributions.erk,
}

# Keys that do not name a field of an updater.
_DISTRIBUTION_KEYS = ('dist_type', 'sparsity', 'filter_fn', 'custom_sparsity_map', 'count_excluded')
_SCHEDULE_KEYS = ('update_freq', 'update_start_step', 'update_end_step', 'power')
_OTHER_KEYS = ('algorithm', 'drop_fraction')


def all_algorithm_names() -> tuple[str, ...]:
    """The names of the algorithms that wrap an optimizer; one-shot ones are in `ONE_SHOT_REGISTRY`.

    >>> all_algorithm_names()[:3]
    ('no_prune', 'magnitude', 'random')
    """
    return tuple(ALGORITHM_REGISTRY)


def register_algorithm(name: str, algorithm: type[BaseUpdater]) -> None:
    """Makes an algorithm known by name; its fields become config keys.

    Args:
      name: a new name.
      algorithm: a subclass of `BaseUpdater`.

    Raises:
      ValueError: another algorithm has the name.
      TypeError: it is no such class.

    >>> register_algorithm('magnitude', algorithms.MagnitudePruning)
    """
    _register(name, algorithm, ALGORITHM_REGISTRY)


def register_one_shot_algorithm(name: str, algorithm: type[BaseUpdater]) -> None:
    """As `register_algorithm`, for one that prunes once and wraps no optimizer.

    Args:
      name: a new name.
      algorithm: a subclass of `BaseUpdater`.

    Raises:
      ValueError: another algorithm has the name.
      TypeError: it is no such class.

    >>> from jaxpruner.oneshot import Wanda
    >>> register_one_shot_algorithm('wanda', Wanda)
    """
    _register(name, algorithm, ONE_SHOT_REGISTRY)


def _register(name: str, algorithm: type[BaseUpdater], registry: dict[str, type[BaseUpdater]]) -> None:
    if not (isinstance(algorithm, type) and issubclass(algorithm, BaseUpdater)):
        raise TypeError(f'an algorithm must be a subclass of jaxpruner.BaseUpdater, got {algorithm!r}')
    known = _known_algorithms().get(name, algorithm)
    if (known.__module__, known.__qualname__) != (algorithm.__module__, algorithm.__qualname__):
        raise ValueError(f'the name {name!r} belongs to {known.__name__}; register {algorithm.__name__} under another')
    registry[name] = algorithm  # a cell of a notebook that is run again defines its class anew


def _known_algorithms() -> dict[str, type[BaseUpdater]]:
    return ALGORITHM_REGISTRY | ONE_SHOT_REGISTRY


def create_updater_from_config(sparsity_config: Any) -> BaseUpdater:
    """Makes an updater from a flat configuration.

    Keys: `algorithm` (required); `dist_type` (`'uniform'` or `'erk'`), `sparsity`, `filter_fn`, `custom_sparsity_map`,
    `count_excluded`; `update_freq`, `update_start_step`, `update_end_step`, `power`, or `scheduler` itself;
    `drop_fraction`; and every field of an updater (`sparsity_type`, `rng_seed`, `use_packed_masks`, …). Without
    `update_freq` masks are never updated. Keys of another algorithm are accepted and unused, so that the algorithm
    alone can be exchanged; `None` stands for a key that is not given.

    Args:
      sparsity_config: a mapping (a dict or an ml_collections `ConfigDict`), a dataclass, or the path of a TOML or JSON
        file.

    Returns:
      The updater.

    Raises:
      ValueError: an unknown key or name (the message tells the nearest), or a bad value.
      FileNotFoundError: there is no such file.

    >>> config = {'algorithm': 'magnitude', 'dist_type': 'erk', 'sparsity': 0.9, 'sparsity_type': '2:4'}
    >>> create_updater_from_config(config).sparsity_type
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """
    config = {key: value for key, value in _as_dict(sparsity_config).items() if value is not None}
    _check_keys(config)
    if 'algorithm' not in config:
        raise ValueError(f"the configuration lacks the key 'algorithm'; known are {', '.join(_known_algorithms())}")
    name = config['algorithm']
    algorithms_by_name = _known_algorithms()
    if name not in algorithms_by_name:
        raise ValueError(f'algorithm {name!r} is unknown; {tree_lib.nearest(str(name), algorithms_by_name)}')
    algorithm = algorithms_by_name[name]
    fields = {field.name for field in dataclasses.fields(algorithm) if field.init}
    kwargs = {key: value for key, value in config.items() if key in fields}
    if 'sparsity_distribution_fn' not in kwargs:
        kwargs |= _distribution(config, algorithm)
    if 'scheduler' not in kwargs:
        kwargs |= _schedule(config, algorithm)
    if 'drop_fraction' in config:
        drop_fraction_fn = _drop_fraction_fn(config)
        if 'drop_fraction_fn' in fields - set(kwargs):
            kwargs['drop_fraction_fn'] = drop_fraction_fn
    updater = algorithm(**kwargs)
    # Settings are checked for the dense baseline, too, but mean nothing to it.
    return NoPruning() if algorithm is NoPruning else updater


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        return config_files.read(config)
    # A ConfigDict is no Mapping, but has its methods.
    if isinstance(config, Mapping) or (hasattr(config, 'keys') and hasattr(config, '__getitem__')):
        return {key: _plain(config[key]) for key in config}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    raise TypeError(f'a configuration is a mapping, a dataclass, or the path of a TOML or JSON file; got {config!r}')


def _plain(value: Any) -> Any:
    """Nested ConfigDicts become dicts."""
    return value.to_dict() if hasattr(value, 'to_dict') and not isinstance(value, Mapping) else value


def _check_keys(config: dict[str, Any]) -> None:
    known = {*_DISTRIBUTION_KEYS, *_SCHEDULE_KEYS, *_OTHER_KEYS}
    for algorithm in _known_algorithms().values():
        known |= {field.name for field in dataclasses.fields(algorithm) if field.init}
    for key in config:
        if key not in known:
            raise ValueError(f'config key {key!r} is unknown; {tree_lib.nearest(key, known)}')


def _distribution(config: dict[str, Any], algorithm: type[BaseUpdater]) -> dict[str, Any]:
    given = [key for key in _DISTRIBUTION_KEYS if key in config]
    if not given:
        return {}
    name = config.get('dist_type', 'uniform')
    if name not in _DISTRIBUTIONS:
        raise ValueError(f'dist_type {name!r} is unknown; {tree_lib.nearest(str(name), _DISTRIBUTIONS)}')
    if 'sparsity' not in config and 'custom_sparsity_map' not in config and algorithm is not NoPruning:
        raise ValueError(f'the configuration has {", ".join(given)} but no sparsity, so that nothing would be pruned')
    kwargs = {key: config[key] for key in ('filter_fn', 'custom_sparsity_map') if key in config}
    if name == 'erk' and 'count_excluded' in config:
        kwargs['count_excluded'] = config['count_excluded']
    sparsity = config.get('sparsity', 0.0)
    return {'sparsity_distribution_fn': functools.partial(_DISTRIBUTIONS[name], sparsity=sparsity, **kwargs)}


def _schedule(config: dict[str, Any], algorithm: type[BaseUpdater]) -> dict[str, Any]:
    given = [key for key in _SCHEDULE_KEYS if key in config]
    if not given:
        return {}
    if 'update_freq' not in config:
        raise ValueError(
            f'the configuration has {", ".join(given)} but no update_freq, so that masks would never change'
        )
    steps = {key: config[key] for key in ('update_freq', 'update_start_step', 'update_end_step') if key in config}
    periodic = sparsity_schedules.PeriodicSchedule(**steps)
    # Without an end there is nothing to approach the target by.
    if not algorithm.approaches_target or 'update_end_step' not in steps:
        return {'scheduler': periodic}
    power = {'power': config['power']} if 'power' in config else {}
    return {'scheduler': sparsity_schedules.PolynomialSchedule(**steps, **power)}


def _drop_fraction_fn(config: dict[str, Any]) -> Callable[[Any], Any]:
    check_drop_fraction(config['drop_fraction'], 'drop_fraction')
    if config.get('update_end_step'):
        return optax.cosine_decay_schedule(config['drop_fraction'], config['update_end_step'])
    return optax.constant_schedule(config['drop_fraction'])
