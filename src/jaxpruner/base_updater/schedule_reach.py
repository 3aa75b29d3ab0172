"""At which steps a schedule updates masks, and how near its target it comes: computed in Python, before anything runs.

A schedule that has no branch here cannot be read, and `init` then warns of nothing that depends on it.
"""

from collections.abc import Sequence
from typing import Any

from jaxpruner import sparsity_schedules

_LAST_STEP = 2**31 - 1  # steps are counted in int32


def update_steps(schedule: Any) -> Sequence[int] | None:
    """Lists all steps at which masks are updated, in order (a range if they are many); `None` if it cannot be read.

    >>> from jaxpruner.sparsity_schedules import PeriodicSchedule
    >>> list(update_steps(PeriodicSchedule(update_freq=100, update_start_step=1, update_end_step=250)))
    [100, 200]
    """
    if _has_method_of(schedule, sparsity_schedules.NoUpdateSchedule, 'is_mask_update_iter'):
        return ()
    if _has_method_of(schedule, sparsity_schedules.OneShotSchedule, 'is_mask_update_iter'):
        return (schedule.target_step,)
    if _has_method_of(schedule, sparsity_schedules.StepsSchedule, 'is_mask_update_iter'):
        return tuple(sorted(schedule.steps))
    if _has_method_of(schedule, sparsity_schedules.PeriodicSchedule, 'is_mask_update_iter'):
        first = -(-schedule.update_start_step // schedule.update_freq) * schedule.update_freq
        end = _LAST_STEP if schedule.update_end_step is None else schedule.update_end_step
        return range(first, end + 1, schedule.update_freq)
    return None


def sparsity_at(schedule: Any, target: float, step: int) -> float | None:
    """Computes the sparsity of a leaf at a step; `None` if the schedule cannot be read, or is always at its target.

    >>> from jaxpruner.sparsity_schedules import PolynomialSchedule
    >>> schedule = PolynomialSchedule(update_freq=100, update_start_step=0, update_end_step=150)
    >>> round(sparsity_at(schedule, 0.8, 100), 3)
    0.772
    """
    if not _has_method_of(schedule, sparsity_schedules.PolynomialSchedule, 'get_sparsity_at_step'):
        return None
    length = schedule.update_end_step - schedule.update_start_step
    progress = min(max(step + 1 - schedule.update_start_step, 0), length) / length if length else 1
    initial = min(float(schedule.initial_sparsity), target)
    return initial + (target - initial) * (1 - (1 - progress) ** float(schedule.power))


def _has_method_of(schedule: Any, cls: type, method: str) -> bool:
    """Whether a schedule is of a class, and no subclass has overridden the method."""
    return isinstance(schedule, cls) and getattr(type(schedule), method) is getattr(cls, method)
