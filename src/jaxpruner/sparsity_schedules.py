"""When masks are updated, and how sparse the parameters are at a step.

A schedule is any object with the two methods of `BaseSchedule`; a new one is a frozen dataclass here or in a user's
code. A method `update_steps` that lists all steps at which masks are updated lets plans and warnings read them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparsity_distributions
from jaxpruner import tree as tree_lib


class BaseSchedule(Protocol):
    """What the driver asks of a schedule: two pure functions of the step.

    >>> class Never:
    ...     def is_mask_update_iter(self, step): return False
    ...     def get_sparsity_at_step(self, target_sparsities, step): return target_sparsities
    """

    def is_mask_update_iter(self, step: Any) -> Any:
        """Whether masks are updated at `step`: a Python bool for a Python int, a bool scalar for an int32 scalar.

        A Python `False` for an int32 scalar means never.
        """
        ...

    def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
        """The sparsities at `step`: a tree like `target_sparsities`, in which `None` stays `None`."""
        ...


_LAST_STEP = 2**31 - 1  # steps are counted in int32


def checked_step(name: str, value: Any, minimum: int = 0) -> int:
    """Reads a setting that counts steps; a float that is a whole number, such as `4e5`, is one.

    Args:
      name: the setting's, for the message.
      value: what it was given.
      minimum: the least that makes sense.

    Returns:
      The number of steps, a Python int, so that the host gets Python bools as answers.

    Raises:
      TypeError: it is no whole number.
      ValueError: it is below the minimum, or too large to be counted in int32.

    >>> checked_step('update_end_step', 4e5)
    400000
    """
    is_number = tree_lib.is_number(value) and not tree_lib.is_traced(value)
    if not is_number or not (isinstance(value, int) or float(value).is_integer()):
        raise TypeError(f'{name} must be a whole number, got {value!r}')
    if not minimum <= int(value) <= _LAST_STEP:
        raise ValueError(f'{name} must be from {minimum} to {_LAST_STEP}, got {int(value)}')
    return int(value)


def check_power(value: Any, name: str) -> None:
    """Refuses what is no exponent of a polynomial schedule.

    Args:
      value: what the setting was given.
      name: the setting's, for the message.

    Raises:
      TypeError: it is no number.
      ValueError: it is not positive, or not finite.

    >>> check_power(3, 'power')
    """
    if not tree_lib.is_number(value):
        raise TypeError(f'{name} must be a number above 0, such as 3, got {value!r}')
    if not 0 < value < math.inf:
        raise ValueError(f'{name} must be positive and finite, got {value}')


def _number(step):
    """A Python int for a step that the host counts, so that it asks no device; else an array."""
    return int(step) if isinstance(step, int | np.integer) else jnp.asarray(step)


class _StepsAtTarget:
    """Masks are updated at the steps that `update_steps` lists, always at the target sparsity."""

    def update_steps(self) -> Sequence[int]:
        """None."""
        return ()

    def is_mask_update_iter(self, step: Any) -> Any:
        """True at the steps that `update_steps` lists; False for no step (`None`)."""
        is_due: Any = (
            False  # if no step is listed, the driver leaves the mask update out of the program
        )
        if step is not None:
            for own in self.update_steps():
                is_due |= _number(step) == own
        return is_due

    def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
        """The targets at every step: `is_mask_update_iter` alone knows when."""
        del step
        return target_sparsities


@dataclasses.dataclass(frozen=True)
class NoUpdateSchedule(_StepsAtTarget):
    """Masks are never updated.

    >>> NoUpdateSchedule().is_mask_update_iter(3)
    False
    """


@dataclasses.dataclass(frozen=True)
class OneShotSchedule(_StepsAtTarget):
    """Masks are updated once, to the target sparsity.

    Straight-through methods select in every forward pass, at the sparsity of the step, so that they are sparse before
    `target_step`, too. A `PolynomialSchedule` keeps them dense until its start.

    Attributes:
      target_step: the step of the update.

    Raises:
      ValueError: the step is negative.

    >>> OneShotSchedule(target_step=5).is_mask_update_iter(5)
    True
    """

    target_step: int

    def __post_init__(self):
        object.__setattr__(self, 'target_step', checked_step('target_step', self.target_step))

    def update_steps(self) -> Sequence[int]:
        """The one step."""
        return (self.target_step,)


@dataclasses.dataclass(frozen=True)
class StepsSchedule(_StepsAtTarget):
    """Masks are updated at the steps of a list, always at the target sparsity.

    Attributes:
      steps: the steps of the updates.

    Raises:
      ValueError: a step is negative.

    >>> schedule = StepsSchedule((3, 7))
    >>> [step for step in range(9) if schedule.is_mask_update_iter(step)]
    [3, 7]
    """

    steps: tuple[int, ...]

    def __post_init__(self):
        steps = tuple(checked_step('a step', step) for step in self.steps)
        object.__setattr__(self, 'steps', steps)

    def update_steps(self) -> Sequence[int]:
        """The steps, in order."""
        return tuple(sorted(self.steps))


@dataclasses.dataclass(frozen=True)
class PeriodicSchedule(_StepsAtTarget):
    """Masks are updated every `update_freq` steps, always at the target sparsity.

    Attributes:
      update_freq: steps between updates; an update happens where `step % update_freq == 0`.
      update_start_step: the first step at which one may happen.
      update_end_step: the last such step, `None` for no end.

    Raises:
      ValueError: a period below 1, a negative step, an end before its start.

    >>> schedule = PeriodicSchedule(update_freq=3, update_start_step=4, update_end_step=9)
    >>> [step for step in range(12) if schedule.is_mask_update_iter(step)]
    [6, 9]
    """

    update_freq: int
    update_start_step: int = 0
    update_end_step: int | None = None

    def __post_init__(self):
        for name, minimum in (('update_freq', 1), ('update_start_step', 0), ('update_end_step', 0)):
            value = getattr(self, name)
            if value is not None or name != 'update_end_step':
                object.__setattr__(self, name, checked_step(name, value, minimum))
        if self.update_end_step is not None and self.update_end_step < self.update_start_step:
            raise ValueError(
                f'update_end_step={self.update_end_step} lies before update_start_step={self.update_start_step}; '
                'give a later end, or None for no end'
            )

    def is_mask_update_iter(self, step: Any) -> Any:
        """True on multiples of `update_freq` from the start to the end, both included; False for no step (`None`)."""
        if step is None:
            return False
        step = _number(step)
        due = (step % self.update_freq == 0) & (step >= self.update_start_step)
        return due if self.update_end_step is None else due & (step <= self.update_end_step)

    def update_steps(self) -> Sequence[int]:
        """The multiples of `update_freq`, a range.

        >>> list(PeriodicSchedule(100, update_start_step=1, update_end_step=250).update_steps())
        [100, 200]
        """
        first = -(-self.update_start_step // self.update_freq) * self.update_freq
        last = _LAST_STEP if self.update_end_step is None else self.update_end_step
        return range(first, last + 1, self.update_freq)


@dataclasses.dataclass(frozen=True)
class PolynomialSchedule(PeriodicSchedule):
    r"""Sparsity grows from an initial value to the target along a polynomial.

    With $t = \mathrm{clip}(step + 1 - start, 0, end - start) / (end - start)$ (1 where start = end) the sparsity is
    $initial + (target - initial) (1 - (1 - t)^{power})$.

    Attributes:
      update_freq: steps between updates.
      update_start_step: the first step at which sparsity is above its initial value.
      update_end_step: the step at which the target has been reached; required. Masks reach it if the last update, the
        last multiple of `update_freq`, comes at this step or the one before.
      power: exponent, 3 as in Zhu and Gupta, "To prune, or not to prune", 2017.
      initial_sparsity: share in [0, 1] from which sparsity grows, as where a model that is already pruned is pruned on.
        A leaf whose target is lower is at its target from the start: it is never sparser than that.

    Raises:
      ValueError: as `PeriodicSchedule`; also no end, a power that is not positive, or an initial sparsity outside
        [0, 1].
      TypeError: the initial sparsity is no number.

    >>> schedule = PolynomialSchedule(update_freq=1, update_start_step=0, update_end_step=10)
    >>> [round(float(schedule.get_sparsity_at_step(0.8, step)), 3) for step in (0, 4, 9, 20)]
    [0.217, 0.7, 0.8, 0.8]
    >>> schedule = PolynomialSchedule(1, 0, 10, initial_sparsity=0.5)
    >>> [round(float(schedule.get_sparsity_at_step(0.9, step)), 3) for step in (0, 4, 9, 20)]
    [0.608, 0.85, 0.9, 0.9]
    """

    power: float = 3
    initial_sparsity: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.update_end_step is None:
            raise ValueError(
                'PolynomialSchedule needs update_end_step: the step at which the target sparsity is reached'
            )
        check_power(self.power, 'power')
        sparsity_distributions.check_sparsity(self.initial_sparsity, 'initial_sparsity')

    def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
        """The way from the initial sparsity to each target, of which `1 - (1 - progress) ** power` is done."""
        assert self.update_end_step is not None
        length = self.update_end_step - self.update_start_step
        if length == 0:
            return target_sparsities
        done = _number(step) + 1 - self.update_start_step
        if isinstance(done, int):
            done = min(max(done, 0), length)
        else:
            done = jnp.clip(done, 0, length).astype(jnp.float32)
        share = 1 - (1 - done / length) ** self.power
        is_from_zero = not tree_lib.is_traced(self.initial_sparsity) and self.initial_sparsity == 0

        def at_share(target):
            initial = 0 if is_from_zero else jnp.minimum(self.initial_sparsity, target)
            return initial + (target - initial) * share

        return jax.tree.map(at_share, target_sparsities)
