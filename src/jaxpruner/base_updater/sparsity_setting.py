"""The keyword `sparsity` of a pruner: one number, short for a distribution."""

import functools
import inspect
from typing import Any

from jaxpruner import sparsity_distributions
from jaxpruner.base_updater.pruner import PlannedPruner

_NAME = 'sparsity_distribution_fn'


class FromSparsity(functools.partial):
    """A distribution that a pruner made of its own settings: another `sparsity` replaces it."""

    # The settings themselves are compared.
    is_derived_setting = True


def is_given(pruner: PlannedPruner) -> bool:
    """Whether a user gave the pruner a distribution."""
    distribution = pruner.sparsity_distribution_fn
    if isinstance(distribution, sparsity_distributions.NotGiven):
        return 'custom_sparsity_map' in distribution.keywords
    is_made_here = isinstance(distribution, FromSparsity)
    return not (distribution is None or distribution is _default(pruner) or is_made_here)


def distribution_of(pruner: PlannedPruner) -> Any:
    """Returns `uniform` at `sparsity` if that is given, else `sparsity_distribution_fn`.

    A user's class may have a field `sparsity` of its own, written when pruners had none. Its default stands beside a
    distribution, which then holds.

    Raises:
      TypeError, ValueError: both are given, or the sparsity is not a valid one.
    """
    distribution = pruner.sparsity_distribution_fn
    if pruner.sparsity is None:
        return _default(pruner) if isinstance(distribution, FromSparsity) else distribution
    if _declares_sparsity_itself(pruner) and _contradicts_settings(pruner):
        return distribution
    check_not_both(pruner)
    return FromSparsity(sparsity_distributions.uniform, sparsity=pruner.sparsity)


def check_not_both(pruner: PlannedPruner, names: str = 'sparsity') -> None:
    """Refuses settings (`names`) beside a distribution, where they would have no effect."""
    if _contradicts_settings(pruner):
        raise ValueError(
            f'{type(pruner).__name__} got {names} and sparsity_distribution_fn, which both say how sparse leaves are '
            'to be; give one of them. functools.partial(f, sparsity=0.7, custom_sparsity_map=…) gives a '
            'distribution f a sparsity; where dataclasses.replace gives it, give also sparsity=None'
        )


def _contradicts_settings(pruner: PlannedPruner) -> bool:
    return is_given(pruner) and not _is_published_default(pruner.sparsity_distribution_fn)


def _declares_sparsity_itself(pruner: PlannedPruner) -> bool:
    """Whether the field `sparsity` is that of a user's class."""
    for base in type(pruner).__mro__:
        if 'sparsity' in inspect.get_annotations(base):
            return base.__module__.partition('.')[0] != 'jaxpruner'
    return False


def _is_published_default(distribution: Any) -> bool:
    """Whether it is JaxPruner's default, written out: clients that pass every field by position give it."""
    if not isinstance(distribution, functools.partial) or distribution.args:
        return False
    is_uniform = distribution.func is sparsity_distributions.uniform
    return is_uniform and distribution.keywords == {'sparsity': 0.0}


def _default(pruner: PlannedPruner) -> Any:
    # If a class is no dataclass itself, a mixin among its bases may show its own fields alone.
    for base in type(pruner).__mro__:
        fields = vars(base).get('__dataclass_fields__', {})
        if _NAME in fields:
            return fields[_NAME].default
    raise AssertionError(_NAME)
