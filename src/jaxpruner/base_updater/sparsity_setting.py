"""The keyword `sparsity` of an updater: one number where a distribution would be much to write."""

import functools
import inspect
from typing import Any

from jaxpruner import sparsity_distributions
from jaxpruner.base_updater.pruner import PlannedPruner

_NAME = 'sparsity_distribution_fn'


class FromSparsity(functools.partial):
    """A distribution that an updater made of its own settings: another `sparsity` replaces it.

    >>> FromSparsity(sparsity_distributions.uniform, sparsity=0.5).keywords
    {'sparsity': 0.5}
    """

    # What is shown of the updater are the settings themselves.
    is_derived_setting = True


def is_given(updater: PlannedPruner) -> bool:
    """Whether a user gave the updater a distribution.

    Args:
      updater: any.

    >>> import jaxpruner
    >>> is_given(jaxpruner.MagnitudePruning(sparsity=0.9))
    False
    """
    distribution = updater.sparsity_distribution_fn
    made_here = isinstance(distribution, FromSparsity | sparsity_distributions.NotGiven)
    return not (distribution is None or distribution is _default(updater) or made_here)


def distribution_of(updater: PlannedPruner) -> Any:
    """The distribution that an updater's settings mean.

    Args:
      updater: whose `sparsity` and `sparsity_distribution_fn` are read.

    Returns:
      Uniform at `sparsity` where that is given, else `sparsity_distribution_fn`. The latter comes first where a user's
      class has a field `sparsity` of its own, whose default is there, too, beside a distribution.

    Raises:
      TypeError, ValueError: both are given, or the sparsity is none.

    >>> import jaxpruner
    >>> distribution_of(jaxpruner.MagnitudePruning(sparsity=0.9)).keywords
    {'sparsity': 0.9}
    """
    if updater.sparsity is None:
        made_here = isinstance(updater.sparsity_distribution_fn, FromSparsity)
        return _default(updater) if made_here else updater.sparsity_distribution_fn
    if _declares_sparsity_itself(updater) and _contradicts_settings(updater):
        return updater.sparsity_distribution_fn
    check_not_both(updater)
    return FromSparsity(sparsity_distributions.uniform, sparsity=updater.sparsity)


def check_not_both(updater: PlannedPruner, names: str = 'sparsity') -> None:
    """Refuses settings beside a distribution, which would have no effect.

    Args:
      updater: any.
      names: those settings, for the message.

    Raises:
      ValueError: a distribution is given.

    >>> import jaxpruner
    >>> check_not_both(jaxpruner.MagnitudePruning(sparsity=0.9))
    """
    if _contradicts_settings(updater):
        raise ValueError(
            f'{type(updater).__name__} got {names} and sparsity_distribution_fn={updater.sparsity_distribution_fn!r}, '
            'which both say how sparse leaves are to be; give one of them (in dataclasses.replace also sparsity=None)'
        )


def _contradicts_settings(updater: PlannedPruner) -> bool:
    return is_given(updater) and not _is_published_default(updater.sparsity_distribution_fn)


def _declares_sparsity_itself(updater: PlannedPruner) -> bool:
    """Whether the field `sparsity` is that of a user's class, written when updaters had none."""
    declaring = [
        base for base in type(updater).__mro__ if 'sparsity' in inspect.get_annotations(base)
    ]
    return declaring[0].__module__.partition('.')[0] != 'jaxpruner'


def _is_published_default(distribution: Any) -> bool:
    """Whether it is JaxPruner's default, written out: clients that pass every field by position give it."""
    if (
        not isinstance(distribution, functools.partial)
        or distribution.func is not sparsity_distributions.uniform
    ):
        return False
    return distribution.args == () and distribution.keywords == {'sparsity': 0.0}


def _default(updater: PlannedPruner) -> Any:
    # Of a class that is no dataclass itself, a mixin among its bases may show its own fields alone.
    tables = [vars(base).get('__dataclass_fields__', {}) for base in type(updater).__mro__]
    return next(fields[_NAME].default for fields in tables if _NAME in fields)
