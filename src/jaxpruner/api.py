"""From a name and a flat configuration to a pruner."""

import dataclasses
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxpruner import (
    algorithms,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
)
from jaxpruner.algorithms import acdc
from jaxpruner.base_updater import BaseUpdater, NoPruning, config_keys
from jaxpruner.files import config_files
from jaxpruner.sparsity_types import normalize_setting
from jaxpruner.tree import nearest

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

# Algorithms that prune once and train nothing; `oneshot` registers them.
ONE_SHOT_REGISTRY: dict[str, type[BaseUpdater]] = {}

_DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    'uniform': sparsity_distributions.uniform,
    'erk': sparsity_distributions.erk,
}

_DISTRIBUTION_KEYS = ('dist_type', 'sparsity', 'filter_fn', 'custom_sparsity_map', 'count_excluded')
_STEP_KEYS = ('update_freq', 'update_start_step', 'update_end_step')
# Names in other libraries, which look like other keys here -> what may be meant.
_MEANT = dict.fromkeys(
    ('total_steps', 'num_steps', 'max_steps', 'train_steps', 'num_train_steps'),
    'update_end_step, the last step at which masks may change',
) | {
    'begin_step': 'update_start_step',
    'frequency': 'update_freq',
    'final_sparsity': 'sparsity',
    'target_sparsity': 'sparsity',
    'density': 'sparsity, the share that is removed',
}
# Key -> keys that say the same in other words.
_EITHER = {
    'sparsity_distribution_fn': _DISTRIBUTION_KEYS,
    'scheduler': (*_STEP_KEYS, 'initial_sparsity'),
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
      algorithm: a subclass of `BaseUpdater`, decorated with `dataclasses.dataclass` if it annotates fields.

    Raises:
      TypeError: it is no such class, it annotates fields and lacks the decorator, or the name is no string.

    >>> register_algorithm('magnitude', algorithms.MagnitudePruning)
    """
    _register(algorithm_name, algorithm, ALGORITHM_REGISTRY)
    ONE_SHOT_REGISTRY.pop(algorithm_name, None)


def register_one_shot_algorithm(algorithm_name: str, algorithm: type[BaseUpdater]) -> None:
    """As `register_algorithm`, for one that prunes once and wraps no optimizer.

    Args:
      algorithm_name: its name in configs.
      algorithm: a subclass of `BaseUpdater`, decorated with `dataclasses.dataclass` if it annotates fields.

    Raises:
      TypeError: it is no such class, it annotates fields and lacks the decorator, or the name is no string.

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
    _check_decorated(name, algorithm)
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


def _check_decorated(name: str, algorithm: type[BaseUpdater]) -> None:
    """Refuses annotations that are no fields, since `dataclasses.dataclass` has not seen them."""
    for base in algorithm.__mro__:
        if not issubclass(base, BaseUpdater) or '__dataclass_fields__' in vars(base):
            continue
        annotated = inspect.get_annotations(base).items()
        settings = [key for key, annotation in annotated if 'ClassVar' not in str(annotation)]
        if settings:
            raise TypeError(
                f'{name!r}: {base.__name__} annotates {", ".join(settings)}, which are no fields, since it is no '
                'dataclass; write @dataclasses.dataclass above it (or ClassVar[…] for what is no setting)'
            )


def _qualified_name(algorithm: type[BaseUpdater]) -> str:
    return f'{algorithm.__module__}.{algorithm.__qualname__}'


def _known_algorithms() -> dict[str, type[BaseUpdater]]:
    # `oneshot` registers its algorithms when it is loaded, which `import jaxpruner.api` alone does not do.
    importlib.import_module('jaxpruner.oneshot')
    return ALGORITHM_REGISTRY | ONE_SHOT_REGISTRY


def create_updater_from_config(sparsity_config: Any) -> BaseUpdater:
    """Makes a pruner from a flat configuration.

    Every field of a pruner is a key (`sparsity_type`, `rng_seed`, `use_packed_masks`, …). Besides:

    Keys:
      algorithm: its name; required.
      sparsity: share of the weights to remove: of every selected leaf or, with ERK and global ranking, of all selected
        leaves together. Leaves in `custom_sparsity_map` do not count in it.
      dist_type: `'uniform'` (default) or `'erk'`, which keeps more weights in small leaves. Global ranking ignores it.
      custom_sparsity_map: leaf name or glob -> sparsity, `None` for a dense leaf; overrides the filter. The first match
        wins. Leaves that it does not name have `sparsity` or, where none is given, the share of their N:M.
      filter_fn: `(path, leaf) -> bool`, selects the leaves of floats to prune; by default those of more than one
        dimension. Integers are pruned only where `custom_sparsity_map` names them.
      count_excluded: with ERK, `sparsity` is the share of all parameters, those of excluded leaves counted.
      update_start_step: first step at which masks may change.
      update_end_step: last step at which masks may change; from there on sparsity is at its target.
      update_freq: masks change at the multiples of this number.
      power: of the polynomial by which sparsity grows until the last update, 3 by default; with `ria`, of the norm of
        the inputs, 0.5 by default.
      initial_sparsity: from which sparsity grows, 0 by default. A leaf with a lower target is at its target from the
        first step.
      drop_fraction: SET and RigL: share of the kept weights to replace, 0.1 by default; it decays by a cosine until the
        last update. (`drop_fraction_fn` of the classes is 0.3 at every step by default.)

    Without `update_start_step` masks are never updated. Where it equals `update_end_step` they are updated once, at
    that step, whatever `update_freq` is. Else they are updated every `update_freq` steps from the start to the end.

    Keys of another algorithm are accepted and unused, so that the algorithm alone can be exchanged; `None` stands for a
    key that is not given.

    Args:
      sparsity_config: a mapping (a dict or an ml_collections `ConfigDict`), a dataclass, a namespace, or the path of a
        TOML or JSON file.

    Returns:
      The pruner.

    Raises:
      TypeError, ValueError: an unknown key or name (the message tells the nearest), or a value of the wrong type or out
        of range (the message names its key).
      FileNotFoundError: there is no such file.

    >>> config = {'algorithm': 'magnitude', 'dist_type': 'erk', 'sparsity': 0.9, 'sparsity_type': '2:4'}
    >>> create_updater_from_config(config).sparsity_type
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """
    config = {}
    for key, value in config_files.as_dict(sparsity_config).items():
        if value is not None:
            config[key] = value
    _check_names(config)
    algorithm = _algorithm(config)
    fields = {field.name: field for field in dataclasses.fields(algorithm) if field.init}
    settings = {}
    for key, value in config.items():
        is_users_own = config_keys.is_users_own(algorithm, key)
        if not is_users_own:
            config_keys.check_key(key, value)
        elif key in fields:  # before a `__post_init__` of its own computes with it
            config_keys.check_annotation(key, fields[key].type, value)
        # The keys of a distribution become one first, whose class need not have them as fields.
        if key in fields and (is_users_own or key not in _DISTRIBUTION_KEYS):
            settings[key] = value
    _check_contradictions(config)
    if algorithm is NoPruning:  # which checks the settings, but has no use for them
        return NoPruning()
    if 'sparsity_distribution_fn' not in settings:
        settings |= _distribution_settings(config, algorithm)
    if 'scheduler' not in settings and _has_schedule(config, algorithm):
        settings['scheduler'] = _schedule(config)
    if 'drop_fraction_fn' in fields and 'drop_fraction_fn' not in settings:
        # A class keeps a default of its own.
        is_inherited = fields['drop_fraction_fn'].default is algorithms.SET.drop_fraction_fn
        if is_inherited or 'drop_fraction' in config:
            settings['drop_fraction_fn'] = _drop_fraction_fn(config)
    return algorithm(**settings)


def _check_names(config: dict[Any, Any]) -> None:
    known = set(config_keys.CONFIG_KEYS)
    for algorithm in _known_algorithms().values():
        known.update([field.name for field in dataclasses.fields(algorithm) if field.init])
    for key in config:
        if not isinstance(key, str):
            raise TypeError(f"config key {key!r} is no string; keys are names such as 'sparsity'")
        if key not in known:
            hint = f'it may mean {_MEANT[key]}' if key in _MEANT else nearest(key, known)
            raise ValueError(f'config key {key!r} is unknown; {hint}')


def _algorithm(config: dict[str, Any]) -> type[BaseUpdater]:
    algorithms_by_name = _known_algorithms()
    if 'algorithm' not in config:
        raise ValueError(
            f"the configuration lacks the key 'algorithm'; known are {', '.join(algorithms_by_name)}"
        )
    name = config['algorithm']
    config_keys.check_key('algorithm', name)
    if name not in algorithms_by_name:
        raise ValueError(f'algorithm {name!r} is unknown; {nearest(name, algorithms_by_name)}')
    return algorithms_by_name[name]


def _check_contradictions(config: dict[str, Any]) -> None:
    """Refuses two keys that say the same thing, of which one would have no effect."""
    for key, others in _EITHER.items():
        given = list(_chosen(config, *others))
        if key in config and given:
            raise ValueError(
                f'{key}={config[key]!r} leaves no meaning for {", ".join(given)}; give one of them'
            )
    packed = _chosen(config, 'use_packed_masks', 'is_packed')
    if len(set(map(bool, packed.values()))) > 1:
        words = ' and '.join([f'{key}={value!r}' for key, value in packed.items()])
        raise ValueError(f'{words} are two names of one setting; give one')


def _chosen(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The part of a configuration that has these keys."""
    return {key: config[key] for key in keys if key in config}


def _distribution_settings(config: dict[str, Any], algorithm: type[BaseUpdater]) -> dict[str, Any]:
    """The fields for the distribution that the keys mean; none where no key is given."""
    given = list(_chosen(config, *_DISTRIBUTION_KEYS))
    if not given:
        return {}
    has_target = 'sparsity' in config or 'custom_sparsity_map' in config
    if not has_target and not _types_prune(config, algorithm):
        raise ValueError(
            f'the configuration has {", ".join(given)} but no sparsity, so that nothing would be pruned'
        )
    if getattr(algorithm, 'ranks_named_leaves_alone', False):
        # A distribution of one budget over all leaves has no meaning; the class itself takes what selects them.
        return _chosen(config, 'filter_fn', 'custom_sparsity_map', 'sparsity')
    settings = {'sparsity': config.get('sparsity', 0.0)}
    settings |= _chosen(config, 'filter_fn', 'custom_sparsity_map')
    name = config.get('dist_type', 'uniform')
    if name == 'erk':
        settings |= _chosen(config, 'count_excluded')
    partial = functools.partial if 'sparsity' in config else sparsity_distributions.NotGiven
    return {'sparsity_distribution_fn': partial(_DISTRIBUTIONS[name], **settings)}


def _types_prune(config: dict[str, Any], algorithm: type[BaseUpdater]) -> bool:
    """Whether a sparsity type decides itself how much is pruned, as N:M does; a function of leaves may."""
    setting = normalize_setting(config.get('sparsity_type', algorithm.sparsity_type))
    entries = setting.values() if isinstance(setting, Mapping) else [setting]
    if any(isinstance(entry, sparsity_types.NByM) for entry in entries):
        return True
    return not isinstance(setting, (Mapping, sparsity_types.SparsityType))


def _has_schedule(config: dict[str, Any], algorithm: type[BaseUpdater]) -> bool:
    """Whether keys mean a schedule; otherwise the class's own default holds."""
    if issubclass(algorithm, algorithms.ACDC) and any(_chosen(config, *acdc.COUNTS).values()):
        return False  # its phases are the schedule
    return bool(_chosen(config, *_STEP_KEYS))


def _schedule(config: dict[str, Any]) -> sparsity_schedules.BaseSchedule:
    start, end = config.get('update_start_step'), config.get('update_end_step')
    initial = config.get('initial_sparsity', 0)
    if initial and (None in (start, end) or start == end):
        raise ValueError(
            f'initial_sparsity={initial} has no effect: sparsity grows from it only between update_start_step={start} '
            f'and update_end_step={end}; give both, the end after the start, or leave initial_sparsity out'
        )
    if start is None:
        return sparsity_schedules.NoUpdateSchedule()
    if start == end:
        return sparsity_schedules.OneShotSchedule(start)
    if 'update_freq' not in config:
        raise ValueError(
            f'the configuration has update_start_step={start} but no update_freq, so that it does not say when masks '
            f'change; give update_freq, or update_end_step={start} to prune once at that step'
        )
    freq = config['update_freq']
    if end is None:  # without a step at which sparsity could reach its target, it is there at once
        return sparsity_schedules.PeriodicSchedule(freq, start)
    # Methods that are at their target from the start read the update steps alone.
    shape = _chosen(config, 'power', 'initial_sparsity')
    return sparsity_schedules.PolynomialSchedule(freq, start, end, **shape)


def _drop_fraction_fn(config: dict[str, Any]) -> optax.Schedule:
    drop_fraction = config.get('drop_fraction', 0.1)
    end = config.get('update_end_step')
    # Partials, so that pruners of equal configurations are equal.
    if not end:
        return functools.partial(_constant_fraction, drop_fraction=drop_fraction)
    return functools.partial(_cosine_decay, drop_fraction=drop_fraction, last_step=end)


def _constant_fraction(step: Any, drop_fraction: Any) -> Any:
    """Returns the drop fraction of a configuration without a last step.

    >>> _constant_fraction(3, 0.1)
    0.1
    """
    del step
    return drop_fraction


def _cosine_decay(step: Any, drop_fraction: Any, last_step: int) -> Any:
    """Returns the drop fraction of a configuration at a step: 0 from the last one on.

    >>> float(_cosine_decay(0, 0.1, 100)).__round__(3), float(_cosine_decay(100, 0.1, 100))
    (0.1, 0.0)
    """
    return optax.cosine_decay_schedule(drop_fraction, last_step)(step)
