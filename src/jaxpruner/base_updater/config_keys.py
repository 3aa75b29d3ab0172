"""What each key of a configuration must be: one table, whatever the algorithm.

Pruners check their fields of the same names by the same table when they are constructed.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxpruner import sparsity_distributions, sparsity_schedules
from jaxpruner.base_updater import targets
from jaxpruner.base_updater.setting_checks import (
    Check,
    Setting,
    are_blocks,
    are_stacks,
    by_value,
    check_scheduler,
    choice,
    is_flag,
    is_integer,
    is_word,
    number_in,
)
from jaxpruner.core import arguments, seeds
from jaxpruner.sparsity_types import normalize_setting
from jaxpruner.tree import is_number


def _check_sparsity(key: str, value: Any) -> None:
    sparsity_distributions.check_sparsity(value, key)


def _check_power(key: str, value: Any) -> None:
    sparsity_schedules.check_power(value, key)


def _check_distribution(key: str, value: Any) -> None:
    _FUNCTION(key, value)
    targets.check_distribution(value)


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number of Python, NumPy or JAX, perhaps a traced one."""
    dtype = getattr(value, 'dtype', None)
    if dtype is None:
        return is_integer(value)
    return jnp.issubdtype(dtype, jnp.integer) and value.ndim == 0


_FLAG = Setting('true or false', is_flag)
_FUNCTION = Setting('a function', callable)
_POSITIVE = Setting('a finite number above 0', is_number, number_in(0, low_is_included=False))
_NOT_NEGATIVE = Setting('a finite number from 0 up', is_number, number_in(0))
_SHARE = Setting('a number between 0 and 1', is_number, number_in(0, 1))
_COUNT = Setting('a whole number from 1 up', is_integer, lambda value: value >= 1)
_STEP = sparsity_schedules.checked_step

CONFIG_KEYS: Mapping[str, Check] = {
    'algorithm': Setting("the name of an algorithm, such as 'magnitude'", is_word),
    # How much of each leaf.
    'sparsity': _check_sparsity,
    'dist_type': choice('uniform', 'erk'),
    'filter_fn': Setting('a function (path, leaf) -> bool', callable),
    'custom_sparsity_map': by_value(sparsity_distributions.check_custom_map),
    'count_excluded': _FLAG,
    'sparsity_distribution_fn': _check_distribution,
    # When.
    'update_freq': functools.partial(_STEP, minimum=1),
    'update_start_step': _STEP,
    'update_end_step': _STEP,
    'power': _check_power,
    'initial_sparsity': _check_sparsity,
    'scheduler': check_scheduler,
    # Which weights together.
    'sparsity_type': by_value(normalize_setting),
    'stacked': Setting(
        'a glob of leaves, a list of globs, or a mapping from globs to axes', are_stacks
    ),
    'topk_fn': Setting('a function (scores, sparsity) -> mask', callable),
    # All pruners.
    'skip_gradients': _FLAG,
    'is_sparse_gradients': _FLAG,
    'rng_seed': by_value(seeds.check_seed),
    'use_packed_masks': _FLAG,
    'is_packed': _FLAG,
    # SET and RigL.
    'drop_fraction': Setting(
        'a number between 0 and 1, the share of kept weights that is replaced',
        is_number,
        number_in(0, 1),
    ),
    'drop_fraction_fn': Setting(
        'a function of the step, such as optax.constant_schedule(0.3)', callable
    ),
    'eps': _NOT_NEGATIVE,
    'is_debug': _FLAG,
    # Global ranking.
    'normalize_scores': _FLAG,
    'use_normalization': _FLAG,
    'normalization_eps': _NOT_NEGATIVE,
    # AC/DC and Adam's Fisher information.
    'reset_optimizer': _FLAG,
    'reset_adam': _FLAG,
    'init_dense_steps_end': _STEP,
    'final_sparse_steps_start': _STEP,
    'cycle_sparse_steps': _STEP,
    'cycle_dense_steps': _STEP,
    # Pruned once.
    'per': choice('output', 'layer'),
    'owl': _FLAG,
    'owl_per': choice('block', 'leaf'),
    'owl_multiple': _POSITIVE,
    'owl_deviation': _SHARE,
    'sequential': _FLAG,
    'blocks': Setting('a list with a glob or a list of globs for each block', are_blocks),
    'damping': _NOT_NEGATIVE,
    'block_size': _COUNT,
    'keep_zeros': _FLAG,
    'rounds': _COUNT,
}

_UNIFORM = 'sparsity_distribution_fn=functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.8'
_ERK = (
    'sparsity_distribution_fn=functools.partial(jaxpruner.sparsity_distributions.erk, sparsity=0.8'
)
_SCHEDULE = (
    'scheduler=jaxpruner.PolynomialSchedule(update_freq=…, update_start_step=…, update_end_step=…)'
)
# Keys that not every constructor takes -> what says the same there.
_SAID_BY_A_FIELD = {
    'dist_type': f'{_ERK})',
    'filter_fn': f'{_UNIFORM}, filter_fn=…)',
    'custom_sparsity_map': f'{_UNIFORM}, custom_sparsity_map=…)',
    'count_excluded': f'{_ERK}, count_excluded=…)',
    'update_freq': _SCHEDULE,
    'update_start_step': _SCHEDULE,
    'update_end_step': _SCHEDULE,
    'power': 'scheduler=jaxpruner.PolynomialSchedule(…, power=…)',
    'initial_sparsity': 'scheduler=jaxpruner.PolynomialSchedule(…, initial_sparsity=…)',
    'drop_fraction': 'drop_fraction_fn=optax.constant_schedule(0.3)',
}

# Fields in which `None` has a meaning of its own, though it is not their default. In a configuration `None` stands for
# any key that is not given.
_MAY_BE_NONE = frozenset(('sparsity', 'sparsity_distribution_fn', 'sparsity_type'))

# Annotation of a field that an algorithm from elsewhere declares -> what its value must be. Other annotations pass.
_ANNOTATIONS: Mapping[type, Setting] = {
    float: Setting('a number', is_number),
    int: Setting('a whole number', _is_whole),
    bool: _FLAG,
    str: Setting('a string', is_word),
}
_ANNOTATION_NAMES = {annotation.__name__: annotation for annotation in _ANNOTATIONS}


def check_key(key: str, value: Any) -> None:
    """Refuses a value, not `None`, that a key of the table cannot have; other keys pass.

    Raises:
      TypeError, ValueError: the value has the wrong type, or is out of range; the message names the key.
    """
    if key in CONFIG_KEYS:
        CONFIG_KEYS[key](key, value)


def check_fields(pruner: Any) -> None:
    """Checks the fields of a pruner: keys of the table by the table, fields of its own class by their annotation.

    Raises:
      TypeError, ValueError: a field has a value of the wrong type or out of range.
    """
    given = vars(pruner)
    for field in dataclasses.fields(pruner):
        name = field.name
        # By attribute only if need be (slots): a field may be a descriptor, which reads as something else.
        value = given[name] if name in given else getattr(pruner, name, field.default)
        if value is None and (field.default is None or name in _MAY_BE_NONE):
            continue
        if is_users_own(type(pruner), name):
            check_annotation(name, field.type, value)
        else:
            check_key(name, value)


def check_constructor_takes(algorithm: type, settings: Mapping[str, Any]) -> None:
    """Refuses keys of configurations that a constructor does not take, and says what it takes instead.

    Raises:
      TypeError: there is such a key.
    """
    taken = arguments.known_arguments(algorithm.__init__, dict(settings))
    for key in settings:
        if key in taken or key not in CONFIG_KEYS:
            continue
        remedy = 'leave it out'
        field = _SAID_BY_A_FIELD.get(key, '')
        # Global algorithms select leaves by fields of their own, and a budget for each leaf has no meaning for them.
        is_of_a_leaf = key in ('dist_type', 'count_excluded') and hasattr(algorithm, 'filter_fn')
        if field and not is_of_a_leaf and hasattr(algorithm, field.partition('=')[0]):
            remedy = f'give {field}'
        raise TypeError(
            f'{algorithm.__name__} has no setting {key!r}, which is a key of configurations; {remedy}, or make the '
            'pruner with jaxpruner.create_updater_from_config'
        )


def check_annotation(key: str, annotation: Any, value: Any) -> None:
    """Checks the value of a field that only its class knows, if it is annotated as `float`, `int`, `bool` or `str`.

    Raises:
      TypeError: the value has another type; the message names the key.
    """
    if isinstance(annotation, str):  # as with `from __future__ import annotations`
        annotation = _ANNOTATION_NAMES.get(annotation)
    if isinstance(annotation, type) and annotation in _ANNOTATIONS:
        _ANNOTATIONS[annotation](key, value)


def is_users_own(algorithm: type, field: str) -> bool:
    """Whether a field was declared outside of this package, so that only its class knows what it means."""
    packages = []
    for base in algorithm.__mro__:
        if field in inspect.get_annotations(base):
            packages.append(base.__module__.partition('.')[0])
    # Where a class of this package declares it, too, a subclass has only given it another default.
    return bool(packages) and 'jaxpruner' not in packages
