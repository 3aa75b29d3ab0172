"""What each key of a configuration must be: one table, whatever the algorithm.

Updaters check their fields of the same names by the same table when they are constructed.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpruner import sparsity_distributions, sparsity_schedules, type_rules
from jaxpruner.base_updater import targets
from jaxpruner.core import seeds
from jaxpruner.core import tree as tree_lib

# (key, value) -> None, or an error that names both.
Check = Callable[[str, Any], Any]


def _any_value(value: Any) -> bool:
    del value
    return True


@dataclasses.dataclass(frozen=True)
class Setting:
    """A check of a value by its type, then by its range.

    Attributes:
      expected: what it must be, for the message.
      has_type: whether a value has the right type.
      is_in_range: whether a value of that type makes sense.

    >>> Setting('a word', lambda value: isinstance(value, str))('name', 'a')
    """

    expected: str
    has_type: Callable[[Any], bool]
    is_in_range: Callable[[Any], bool] = _any_value

    def __call__(self, key: str, value: Any) -> None:
        """Refuses a value that is not what is expected.

        Raises:
          TypeError: it has the wrong type.
          ValueError: it is out of range.
        """
        if not self.has_type(value):
            raise TypeError(f'{key} must be {self.expected}, got {value!r}')
        if not self.is_in_range(value):
            raise ValueError(f'{key} must be {self.expected}, got {value!r}')


def check_key(key: str, value: Any) -> None:
    """Refuses a value that a key of the table cannot have; other keys pass.

    Args:
      key: of a configuration.
      value: what it is given, not `None`.

    Raises:
      TypeError, ValueError: the value has the wrong type, or is out of range; the message names the key.

    >>> check_key('update_freq', 1000)
    """
    if key in CONFIG_KEYS:
        CONFIG_KEYS[key](key, value)


def check_fields(updater: Any) -> None:
    """Checks the fields of an updater that are keys of the table.

    Args:
      updater: a dataclass, whose class or subclasses may have fields of their own.

    Raises:
      TypeError, ValueError: a field has a value of the wrong type or out of range.

    >>> import jaxpruner
    >>> check_fields(jaxpruner.MagnitudePruning())
    """
    given = vars(updater)
    for field in dataclasses.fields(updater):
        # By attribute only if need be (slots): a field may be a descriptor that makes something of the setting.
        value = (
            given[field.name]
            if field.name in given
            else getattr(updater, field.name, field.default)
        )
        is_left_out = value is None and (field.default is None or field.name in _MAY_BE_NONE)
        if not is_left_out and not is_users_own(type(updater), field.name):
            check_key(field.name, value)


def is_users_own(algorithm: type, field: str) -> bool:
    """Whether a field was declared outside of this package, so that only its class knows what it means.

    Args:
      algorithm: an updater's class.
      field: a name.

    >>> import jaxpruner
    >>> is_users_own(jaxpruner.MagnitudePruning, 'rng_seed')
    False
    """
    declaring = [cls for cls in algorithm.__mro__ if field in inspect.get_annotations(cls)]
    # Where a class of this package declares it, too, a subclass has only given it another default.
    return bool(declaring) and not any(
        cls.__module__.partition('.')[0] == 'jaxpruner' for cls in declaring
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _number_in(
    low: float, high: float = math.inf, low_is_included: bool = True
) -> Callable[[Any], bool]:
    """A check of a finite number; one that is being traced is not known, and passes."""

    def is_in_range(value: Any) -> bool:
        if tree_lib.is_traced(value):
            return True
        number = float(value)
        is_above = number >= low if low_is_included else number > low
        return is_above and number <= high and math.isfinite(number)

    return is_in_range


def _check_period(key: str, value: Any) -> None:
    sparsity_schedules.checked_step(key, value, minimum=1)


def _check_scheduler(key: str, value: Any) -> None:
    for method in ('is_mask_update_iter', 'get_sparsity_at_step'):
        if not callable(getattr(value, method, None)):
            raise TypeError(
                f'{key} must have the method {method}, as those in sparsity_schedules; got {value!r}'
            )
    if isinstance(value, type):
        raise TypeError(
            f'{key} must be a schedule, got the class {value!r}; write {value.__name__}(…)'
        )


def _check_sparsity_type(key: str, value: Any) -> None:
    del key  # the message has it
    type_rules.normalize_setting(value)


def _check_custom_map(key: str, value: Any) -> None:
    del key  # the message has it
    sparsity_distributions.check_custom_map(value)


def _check_seed(key: str, value: Any) -> None:
    del key  # the message has it
    seeds.check_seed(value)


def _check_distribution(key: str, value: Any) -> None:
    _FUNCTION(key, value)
    targets.check_distribution(value)


def _are_names(value: Any) -> bool:
    """Whether it is a glob, or a list of globs and paths."""
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(map(_is_name, value)))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) or (
        isinstance(name, list | tuple) and all(isinstance(part, str) for part in name)
    )


def _are_blocks(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_are_names, value))


def _choice(*words: str) -> Setting:
    return Setting(' or '.join(map(repr, words)), _is_word, words.__contains__)


_FLAG = Setting('true or false', _is_flag)
_FUNCTION = Setting('a function', callable)
_POSITIVE = Setting(
    'a finite number above 0', tree_lib.is_number, _number_in(0, low_is_included=False)
)
_NOT_NEGATIVE = Setting('a finite number from 0 up', tree_lib.is_number, _number_in(0))
_COUNT = Setting('a whole number from 1 up', _is_integer, lambda value: value >= 1)
_STEP = sparsity_schedules.checked_step

CONFIG_KEYS: Mapping[str, Check] = {
    'algorithm': Setting("the name of an algorithm, such as 'magnitude'", _is_word),
    # How much of each leaf.
    'sparsity': lambda key, value: sparsity_distributions.check_sparsity(value, key),
    'dist_type': _choice('uniform', 'erk'),
    'filter_fn': Setting('a function (path, leaf) -> bool', callable),
    'custom_sparsity_map': _check_custom_map,
    'count_excluded': _FLAG,
    'sparsity_distribution_fn': _check_distribution,
    # When.
    'update_freq': _check_period,
    'update_start_step': _STEP,
    'update_end_step': _STEP,
    'power': lambda key, value: sparsity_schedules.check_power(value, key),
    'scheduler': _check_scheduler,
    # Which weights together.
    'sparsity_type': _check_sparsity_type,
    'stacked': Setting('a glob of leaves, or a list of globs', _are_names),
    'topk_fn': Setting('a function (scores, sparsity) -> mask', callable),
    # All updaters.
    'skip_gradients': _FLAG,
    'is_sparse_gradients': _FLAG,
    'rng_seed': _check_seed,
    'use_packed_masks': _FLAG,
    'is_packed': _FLAG,
    # SET and RigL.
    'drop_fraction': Setting(
        'a number between 0 and 1, the share of kept weights that is replaced',
        tree_lib.is_number,
        _number_in(0, 1),
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
    'per': _choice('output', 'layer'),
    'owl': _FLAG,
    'owl_per': _choice('block', 'leaf'),
    'owl_multiple': _POSITIVE,
    'owl_deviation': Setting('a number between 0 and 1', tree_lib.is_number, _number_in(0, 1)),
    'sequential': _FLAG,
    'blocks': Setting('a list with a glob or a list of globs for each block', _are_blocks),
    'damping': _NOT_NEGATIVE,
    'block_size': _COUNT,
    'rounds': _COUNT,
}

# Fields in which `None` means something besides those of which it is the default; in a configuration it stands for any
# key that is not given.
_MAY_BE_NONE = frozenset(('sparsity', 'sparsity_distribution_fn', 'sparsity_type'))
