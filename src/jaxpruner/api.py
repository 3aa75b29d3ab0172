"""From a name and a flat configuration to an updater."""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxpruner import (
    algorithms,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
    type_rules,
)
from jaxpruner.algorithms import acdc
from jaxpruner.base_updater import BaseUpdater, NoPruning, config_keys
from jaxpruner.core import config_files
from jaxpruner.core import tree as tree_lib

logger = logging.getLogger(__name__)

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
    'adam-fisher': algorithms.AdamFisherPruning,
    'iterative_nm': algorithms.IterativeNMPruning,
    'movement': algorithms.MovementPruning,
}
ALGORITHMS = ALGORITHM_REGISTRY

# Second name -> first name of the same algorithm.
_SECOND_NAMES = {'adam-fisher': 'adam_fisher'}

# Algorithms that prune once and train nothing; the room that has them registers them.
ONE_SHOT_REGISTRY: dict[str, type[BaseUpdater]] = {}

_DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    'uniform': sparsity_distributions.uniform,
    'erk': sparsity_distributions.erk,
}

_DISTRIBUTION_KEYS = ('dist_type', 'sparsity', 'filter_fn', 'custom_sparsity_map', 'count_excluded')
_STEP_KEYS = ('update_freq', 'update_start_step', 'update_end_step')
# Key -> keys that say the same in other words.
_EITHER = {
    'sparsity_distribution_fn': _DISTRIBUTION_KEYS,
    'scheduler': _STEP_KEYS,
    'drop_fraction_fn': ('drop_fraction',),
}


def all_algorithm_names() -> tuple[str, ...]:
    """The names of the algorithms that wrap an optimizer; one-shot ones are in `ONE_SHOT_REGISTRY`.

    An algorithm of two names is listed once.

    >>> all_algorithm_names()[:3]
    ('no_prune', 'magnitude', 'random')
    """
    return tuple(name for name in ALGORITHM_REGISTRY if not _is_second_name(name))


def _is_second_name(name: str) -> bool:
    first = _SECOND_NAMES.get(name)
    return first is not None and ALGORITHM_REGISTRY[name] is ALGORITHM_REGISTRY.get(first)


def register_algorithm(algorithm_name: str, algorithm: type[BaseUpdater]) -> None:
    """Makes an algorithm known by name; its fields become config keys.

    It replaces the algorithm that has the name, and a line of the log says so.

    Args:
      algorithm_name: its name in configs.
      algorithm: a subclass of `BaseUpdater`.

    Raises:
      TypeError: it is no such class, or the name is no string.

    >>> register_algorithm('magnitude', algorithms.MagnitudePruning)
    """
    _register(algorithm_name, algorithm, ALGORITHM_REGISTRY)
    ONE_SHOT_REGISTRY.pop(algorithm_name, None)


def register_one_shot_algorithm(algorithm_name: str, algorithm: type[BaseUpdater]) -> None:
    """As `register_algorithm`, for one that prunes once and wraps no optimizer.

    Args:
      algorithm_name: its name in configs.
      algorithm: a subclass of `BaseUpdater`.

    Raises:
      TypeError: it is no such class, or the name is no string.

    >>> from jaxpruner.oneshot import Wanda
    >>> register_one_shot_algorithm('wanda', Wanda)
    """
    _register(algorithm_name, algorithm, ONE_SHOT_REGISTRY)
    ALGORITHM_REGISTRY.pop(algorithm_name, None)


def _register(
    name: str, algorithm: type[BaseUpdater], registry: dict[str, type[BaseUpdater]]
) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"the name of an algorithm must be a string, such as 'my_pruner', got {name!r}"
        )
    if not (isinstance(algorithm, type) and issubclass(algorithm, BaseUpdater)):
        raise TypeError(
            f'{name!r}: an algorithm must be a subclass of jaxpruner.BaseUpdater (the class, not an instance), got '
            f'{algorithm!r}'
        )
    replaced = _known_algorithms().get(name)
    # A cell of a notebook that is run again defines its class anew: that is no news.
    if replaced is not None and _qualified_name(replaced) != _qualified_name(algorithm):
        logger.warning(
            'the algorithm %r is now %s; it was %s',
            name,
            _qualified_name(algorithm),
            _qualified_name(replaced),
        )
    registry[name] = algorithm


def _qualified_name(algorithm: type[BaseUpdater]) -> str:
    return f'{algorithm.__module__}.{algorithm.__qualname__}'


def _known_algorithms() -> dict[str, type[BaseUpdater]]:
    # The room above registers its algorithms when it is loaded, which `import jaxpruner.api` alone does not do.
    importlib.import_module('jaxpruner.oneshot')
    return ALGORITHM_REGISTRY | ONE_SHOT_REGISTRY


def create_updater_from_config(sparsity_config: Any) -> BaseUpdater:
    """Makes an updater from a flat configuration.

    Keys: `algorithm` (required); `dist_type` (`'uniform'` or `'erk'`), `sparsity`, `filter_fn`, `custom_sparsity_map`,
    `count_excluded`; `update_freq`, `update_start_step`, `update_end_step`, `power`, or `scheduler` itself;
    `drop_fraction`; and every field of an updater (`sparsity_type`, `rng_seed`, `use_packed_masks`, …).

    Without `update_start_step` masks are never updated. Where it equals `update_end_step` they are updated once, at
    that step, whatever `update_freq` is. Else they are updated every `update_freq` steps from the start to the end.

    Keys of another algorithm are accepted and unused, so that the algorithm alone can be exchanged; `None` stands for a
    key that is not given.

    Args:
      sparsity_config: a mapping (a dict or an ml_collections `ConfigDict`), a dataclass, a namespace, or the path of a
        TOML or JSON file.

    Returns:
      The updater.

    Raises:
      TypeError, ValueError: an unknown key or name (the message tells the nearest), or a value of the wrong type or out
        of range (the message names its key).
      FileNotFoundError: there is no such file.

    >>> config = {'algorithm': 'magnitude', 'dist_type': 'erk', 'sparsity': 0.9, 'sparsity_type': '2:4'}
    >>> create_updater_from_config(config).sparsity_type
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """
    config = {
        key: value
        for key, value in config_files.as_dict(sparsity_config).items()
        if value is not None
    }
    _check_names(config)
    algorithm = _algorithm(config)
    for key, value in config.items():
        if not config_keys.is_users_own(algorithm, key):
            config_keys.check_key(key, value)
    _check_contradictions(config)
    if (
        algorithm is NoPruning
    ):  # settings are checked for the dense baseline, too, but mean nothing to it
        return NoPruning()
    fields = {field.name: field for field in dataclasses.fields(algorithm) if field.init}
    settings = {
        key: value
        for key, value in config.items()
        if key in fields and _is_for_class(key, algorithm)
    }
    if 'sparsity_distribution_fn' not in settings:
        settings |= _distribution(config, algorithm)
    if 'scheduler' not in settings:
        settings |= _schedule(config, algorithm)
    if 'drop_fraction_fn' in fields and 'drop_fraction_fn' not in settings:
        settings |= _drop_fraction(config, fields['drop_fraction_fn'].default)
    return algorithm(**settings)


def _check_names(config: dict[str, Any]) -> None:
    known = set(config_keys.CONFIG_KEYS)
    for algorithm in _known_algorithms().values():
        known |= {field.name for field in dataclasses.fields(algorithm) if field.init}
    for key in config:
        if not isinstance(key, str):
            raise TypeError(f"config key {key!r} is no string; keys are names such as 'sparsity'")
        if key not in known:
            raise ValueError(f'config key {key!r} is unknown; {tree_lib.nearest(key, known)}')


def _algorithm(config: dict[str, Any]) -> type[BaseUpdater]:
    algorithms_by_name = _known_algorithms()
    if 'algorithm' not in config:
        raise ValueError(
            f"the configuration lacks the key 'algorithm'; known are {', '.join(algorithms_by_name)}"
        )
    name = config['algorithm']
    config_keys.check_key('algorithm', name)
    if name not in algorithms_by_name:
        raise ValueError(
            f'algorithm {name!r} is unknown; {tree_lib.nearest(name, algorithms_by_name)}'
        )
    return algorithms_by_name[name]


def _is_for_class(key: str, algorithm: type[BaseUpdater]) -> bool:
    """Whether a key that is a field goes to the class as it is; others become a distribution first."""
    return key not in _DISTRIBUTION_KEYS or config_keys.is_users_own(algorithm, key)


def _check_contradictions(config: dict[str, Any]) -> None:
    """Refuses two keys that say the same thing, of which one would have no effect."""
    for key, others in _EITHER.items():
        given = [other for other in others if other in config]
        if key in config and given:
            raise ValueError(
                f'{key}={config[key]!r} leaves no meaning for {", ".join(given)}; give one of them'
            )
    first, second = config.get('use_packed_masks'), config.get('is_packed')
    if first is not None and second is not None and bool(first) != bool(second):
        raise ValueError(
            f'use_packed_masks={first!r} and is_packed={second!r} are two names of one setting; give one'
        )


def _distribution(config: dict[str, Any], algorithm: type[BaseUpdater]) -> dict[str, Any]:
    given = [key for key in _DISTRIBUTION_KEYS if key in config]
    if not given:
        return {}
    has_target = 'sparsity' in config or 'custom_sparsity_map' in config
    if not has_target and not _types_prune(config, algorithm):
        raise ValueError(
            f'the configuration has {", ".join(given)} but no sparsity, so that nothing would be pruned'
        )
    settings = {key: config[key] for key in ('filter_fn', 'custom_sparsity_map') if key in config}
    if getattr(algorithm, 'ranks_named_leaves_alone', False):
        # A distribution of one budget over all leaves has no meaning; the class itself takes what selects them.
        return settings | {key: config[key] for key in ('sparsity',) if key in config}
    name = config.get('dist_type', 'uniform')
    if name == 'erk' and 'count_excluded' in config:
        settings['count_excluded'] = config['count_excluded']
    partial = functools.partial if has_target else sparsity_distributions.NotGiven
    sparsity = config.get('sparsity', 0.0)
    return {
        'sparsity_distribution_fn': partial(_DISTRIBUTIONS[name], sparsity=sparsity, **settings)
    }


def _types_prune(config: dict[str, Any], algorithm: type[BaseUpdater]) -> bool:
    """Whether a sparsity type says itself how much is pruned, as N:M does; of a function that is not known."""
    setting = type_rules.normalize_setting(config.get('sparsity_type', algorithm.sparsity_type))
    if isinstance(setting, Mapping):
        return any(isinstance(entry, sparsity_types.NByM) for entry in setting.values())
    return isinstance(setting, sparsity_types.NByM) or not isinstance(
        setting, sparsity_types.SparsityType
    )


def _schedule(config: dict[str, Any], algorithm: type[BaseUpdater]) -> dict[str, Any]:
    """The schedule that the keys mean; nothing where none is given, so that the class's own default holds."""
    counts_phases = issubclass(algorithm, algorithms.ACDC) and any(
        config.get(key) for key in acdc.COUNTS
    )
    if counts_phases or not any(key in config for key in _STEP_KEYS):
        return {}
    start, end = config.get('update_start_step'), config.get('update_end_step')
    if start is None:
        return {'scheduler': sparsity_schedules.NoUpdateSchedule()}
    if start == end:
        return {'scheduler': sparsity_schedules.OneShotSchedule(start)}
    if 'update_freq' not in config:
        raise ValueError(
            f'the configuration has update_start_step={start} but no update_freq, so that it does not say when masks '
            f'change; give update_freq, or update_end_step={start} to prune once at that step'
        )
    if (
        end is None
    ):  # there is no step at which sparsity could reach its target: it is there at once
        return {'scheduler': sparsity_schedules.PeriodicSchedule(config['update_freq'], start)}
    # Methods that are at their target from the start read the update steps alone.
    power = {'power': config['power']} if 'power' in config else {}
    return {
        'scheduler': sparsity_schedules.PolynomialSchedule(
            config['update_freq'], start, end, **power
        )
    }


def _drop_fraction(config: dict[str, Any], default: Any) -> dict[str, Any]:
    """The drop fraction that the keys mean; nothing where none is given and the class has a default of its own."""
    is_own_default = default is not algorithms.SET.drop_fraction_fn
    if is_own_default and 'drop_fraction' not in config:
        return {}
    first = config.get('drop_fraction', 0.1)
    end = config.get('update_end_step')
    decays = optax.cosine_decay_schedule(first, end) if end else optax.constant_schedule(first)
    return {'drop_fraction_fn': decays}
