"""From a name and a flat configuration to a pruner."""

import dataclasses
import functools
import importlib
import inspect
from typing import Any

import optax

from jaxpruner import algorithms, checks, sparsity_distributions, sparsity_schedules
from jaxpruner.algorithms import ALGORITHM_REGISTRY as ALGORITHM_REGISTRY
from jaxpruner.algorithms import acdc
from jaxpruner.base_updater import BaseUpdater, NoPruning
from jaxpruner.files import input_files
from jaxpruner.tree import nearest

ALGORITHMS = ALGORITHM_REGISTRY

# Algorithms that prune once and train nothing; `oneshot` puts them here.
ONE_SHOT_REGISTRY: dict[str, type[BaseUpdater]] = {}

_DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}
_STEP_KEYS = ('update_freq', 'update_start_step', 'update_end_step')


def all_algorithm_names() -> tuple[str, ...]:
    """The names of the algorithms that wrap an optimizer; one-shot ones are in `ONE_SHOT_REGISTRY`.

    An algorithm of two names is listed once, by the first.

    >>> all_algorithm_names()[:3]
    ('no_prune', 'magnitude', 'random')
    """
    registry, second = ALGORITHM_REGISTRY, 'adam-fisher'
    is_second_name = registry.get(second) is registry.get('adam_fisher')
    return tuple(name for name in registry if name != second or not is_second_name)


def register_algorithm(algorithm_name: str, algorithm: type[BaseUpdater]) -> None:
    """Makes an algorithm known by name; its fields become config keys.

    It replaces the algorithm that has the name.

    Args:
      algorithm_name: its name in configs.
      algorithm: a subclass of `BaseUpdater`, decorated with `dataclasses.dataclass` if it annotates fields.

    Raises:
      TypeError: it is no such class, it annotates fields and lacks the decorator, or the name is no string.

    >>> register_algorithm('magnitude', algorithms.MagnitudePruning)
    """
    name = algorithm_name
    if not isinstance(name, str):
        raise TypeError(
            f"the name of an algorithm must be a string, such as 'my_pruner', got {name!r}"
        )
    if not (isinstance(algorithm, type) and issubclass(algorithm, BaseUpdater)):
        raise TypeError(
            f'{name!r}: an algorithm must be a subclass of jaxpruner.BaseUpdater (the class, not an instance), got '
            f'{algorithm!r}'
        )
    for base in algorithm.__mro__:
        if not issubclass(base, BaseUpdater) or '__dataclass_fields__' in vars(base):
            continue
        annotated = inspect.get_annotations(base).items()
        if settings := [key for key, annotation in annotated if 'ClassVar' not in str(annotation)]:
            raise TypeError(
                f'{name!r}: {base.__name__} annotates {", ".join(settings)}, which are no fields, since it is no '
                'dataclass; write @dataclasses.dataclass above it (or ClassVar[…] for what is no setting)'
            )
    ALGORITHM_REGISTRY[name] = algorithm
    ONE_SHOT_REGISTRY.pop(name, None)


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
    config = {
        key: value
        for key, value in input_files.as_dict(sparsity_config).items()
        if value is not None
    }
    algorithm = _algorithm(config)
    fields = {field.name: field for field in dataclasses.fields(algorithm) if field.init}
    settings = {}
    for key, value in config.items():
        checks.check_setting(algorithm, key, value)
        # The keys of a distribution become one first, whose class need not have them as fields.
        is_users_own = not checks.is_of_library(algorithm, key)
        if key in fields and (is_users_own or key not in checks.DISTRIBUTION_KEYS):
            settings[key] = value
    for key, others in checks.SAID_BY.items():
        given = [other for other in others if other in config]
        if key in config and given:
            raise ValueError(
                f'{key}={config[key]!r} leaves no meaning for {", ".join(given)}; give one of them'
            )
    packed = {key: config[key] for key in ('use_packed_masks', 'is_packed') if key in config}
    if len(set(map(bool, packed.values()))) > 1:
        words = ' and '.join(f'{key}={value!r}' for key, value in packed.items())
        raise ValueError(f'{words} are two names of one setting; give one')
    if algorithm is NoPruning:  # which checks the settings, but has no use for them
        return NoPruning()
    if 'sparsity_distribution_fn' not in settings:
        settings |= _distribution_settings(config, algorithm)
    # The phases of AC/DC, given as counts, are its schedule.
    has_phases = issubclass(algorithm, algorithms.ACDC) and any(map(config.get, acdc.COUNTS))
    if 'scheduler' not in settings and not has_phases and any(key in config for key in _STEP_KEYS):
        settings['scheduler'] = _schedule(config)
    if 'drop_fraction_fn' in fields and 'drop_fraction_fn' not in settings:
        # A class keeps a default of its own.
        is_inherited = fields['drop_fraction_fn'].default is algorithms.SET.drop_fraction_fn
        if is_inherited or 'drop_fraction' in config:
            initial, last = config.get('drop_fraction', 0.1), config.get('update_end_step')
            decay = optax.cosine_decay_schedule(initial, last) if last else None
            settings['drop_fraction_fn'] = decay or optax.constant_schedule(initial)
    return algorithm(**settings)


def _algorithm(config):
    """Finds the algorithm of a configuration; refuses names of keys and algorithms that nobody knows."""
    # `oneshot` names its algorithms when it is loaded, which `import jaxpruner.api` alone does not do.
    importlib.import_module('jaxpruner.oneshot')
    known_algorithms = ALGORITHM_REGISTRY | ONE_SHOT_REGISTRY
    known = {'algorithm', *checks.SETTINGS}
    for algorithm in known_algorithms.values():
        known.update(field.name for field in dataclasses.fields(algorithm) if field.init)
    for key in config:
        if not isinstance(key, str):
            raise TypeError(f"config key {key!r} is no string; keys are names such as 'sparsity'")
        if key not in known:
            raise ValueError(f'config key {key!r} is unknown; {nearest(key, known)}')
    if 'algorithm' not in config:
        raise ValueError(
            f"the configuration lacks the key 'algorithm'; known are {', '.join(known_algorithms)}"
        )
    name = config['algorithm']
    if not isinstance(name, str) or name not in known_algorithms:
        raise ValueError(f'algorithm {name!r} is unknown; {nearest(str(name), known_algorithms)}')
    return known_algorithms[name]


def _distribution_settings(config, algorithm):
    """The fields for the distribution that the keys mean; none where no key is given."""
    given = {key: config[key] for key in checks.DISTRIBUTION_KEYS if key in config}
    if not given:
        return {}
    name = given.pop('dist_type', 'uniform')
    if getattr(algorithm, 'ranks_named_leaves_alone', False):
        # A distribution of one budget over all leaves has no meaning; the class itself takes what selects them.
        return given
    partial = functools.partial if 'sparsity' in given else sparsity_distributions.NotGiven
    settings = {'sparsity': 0.0, **given}
    return {'sparsity_distribution_fn': partial(_DISTRIBUTIONS[name], **settings)}


def _schedule(config):
    freq, start, end = (config.get(key) for key in _STEP_KEYS)
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
    if freq is None:
        raise ValueError(
            f'the configuration has update_start_step={start} but no update_freq, so that it does not say when masks '
            f'change; give update_freq, or update_end_step={start} to prune once at that step'
        )
    if end is None:  # without a step at which sparsity could reach its target, it is there at once
        return sparsity_schedules.PeriodicSchedule(freq, start)
    # Methods that are at their target from the start read the update steps alone.
    shape = {key: config[key] for key in ('power', 'initial_sparsity') if key in config}
    return sparsity_schedules.PolynomialSchedule(freq, start, end, **shape)
