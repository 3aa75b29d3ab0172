"""AC/DC: dense and sparse phases in turn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import checks, sparsity_schedules
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(frozen=True)
class PhasesSchedule:
    """Masks are updated where a dense or a sparse phase begins.

    Training is dense until `init_dense_steps_end`. Then sparse and dense phases follow one another, and from
    `final_sparse_steps_start` on it is sparse.

    Attributes:
      init_dense_steps_end: the first step of the first sparse phase.
      final_sparse_steps_start: the first step of the last phase, a sparse one.
      cycle_sparse_steps: length of a sparse phase.
      cycle_dense_steps: length of a dense phase.

    Raises:
      ValueError: a negative number, phases without a length, or an end before its start.

    >>> schedule = PhasesSchedule(2, 9, 3, 1)
    >>> [step for step in range(12) if schedule.is_sparse(step)]
    [2, 3, 4, 6, 7, 8, 9, 10, 11]
    >>> [step for step in range(12) if schedule.is_mask_update_iter(step)]
    [2, 5, 6]
    """

    init_dense_steps_end: int
    final_sparse_steps_start: int
    cycle_sparse_steps: int
    cycle_dense_steps: int

    def __post_init__(self):
        for name in COUNTS:
            step = sparsity_schedules.checked_step(name, getattr(self, name))
            object.__setattr__(self, name, step)
        start, end = self.init_dense_steps_end, self.final_sparse_steps_start
        if end < start:
            raise ValueError(
                f'final_sparse_steps_start={end} lies before init_dense_steps_end={start}; give a later start of the '
                'last sparse phase'
            )
        if end > start and not self.cycle_sparse_steps:
            raise ValueError(
                f'cycle_sparse_steps is 0, so that nothing is sparse from step {start} to {end}; give the length of a '
                'sparse phase, or the same step for both'
            )

    def is_sparse(self, step: Any) -> Any:
        """Whether training is sparse at a step: a Python bool for a Python int, else a bool scalar."""
        step = int(step) if isinstance(step, int | np.integer) else jnp.asarray(step)
        since_start = step - self.init_dense_steps_end
        length = max(self.cycle_sparse_steps + self.cycle_dense_steps, 1)
        is_in_sparse_phase = (since_start >= 0) & (since_start % length < self.cycle_sparse_steps)
        return is_in_sparse_phase | (step >= self.final_sparse_steps_start)

    def is_mask_update_iter(self, step: Any) -> Any:
        """Whether a phase begins at a step."""
        return self.is_sparse(step) != self.is_sparse(step - 1)

    def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
        """Returns the targets in sparse phases, 0 in dense ones."""
        sparse = self.is_sparse(step)
        return jax.tree.map(lambda target: jnp.where(sparse, target, 0.0), target_sparsities)


COUNTS = tuple(field.name for field in dataclasses.fields(PhasesSchedule))


@dataclasses.dataclass
class ACDC(pruners.MagnitudePruning):
    """Alternating compressed and decompressed training. Peste et al., 2021.

    Training starts dense. Then sparse phases, with masks of the largest weights, and dense ones, in which all weights
    are trained, follow one another. Their steps are given by a schedule or by four counts.

    Each update of a (periodic) scheduler begins a phase, the first one sparse. The last update begins a sparse phase
    that lasts to the end. Without `update_end_step` phases go on for ever. `scheduler` then holds these phases.

    Attributes:
      scheduler: a `PeriodicSchedule`: `update_freq` is the length of a phase.
      init_dense_steps_end: with the next three instead of a scheduler: the first step of the first sparse phase.
      final_sparse_steps_start: the first step of the last phase, a sparse one.
      cycle_sparse_steps: length of a sparse phase.
      cycle_dense_steps: length of a dense phase.
      reset_optimizer: the optimizer's moments become zero where a phase begins dense, as published. `None`: they do
        with a scheduler, and do not with counts, as in JaxPruner.

    Raises:
      TypeError: the scheduler is not periodic.
      ValueError: a scheduler and counts are given, or counts that do not fit together.

    >>> schedule = sparsity_schedules.PeriodicSchedule(update_freq=10, update_start_step=10, update_end_step=40)
    >>> pruner = ACDC(schedule)
    >>> [pruner.scheduler.is_sparse(step) for step in (9, 10, 20, 30, 40)]
    [False, True, False, True, True]
    """

    init_dense_steps_end: int = 0
    final_sparse_steps_start: int = 0
    cycle_sparse_steps: int = 0
    cycle_dense_steps: int = 0
    reset_optimizer: bool | None = None

    def __post_init__(self):
        counts = {name: getattr(self, name) for name in COUNTS}
        schedule, has_counts = self.scheduler, any(counts.values())
        if self.reset_optimizer is None:
            self.reset_optimizer = not has_counts
        if has_counts:
            if not isinstance(schedule, sparsity_schedules.NoUpdateSchedule | PhasesSchedule):
                raise ValueError(
                    f'ACDC takes a scheduler or counts of steps, got {schedule!r} and {counts}'
                )
            self.scheduler = PhasesSchedule(**counts)
        super().__post_init__()
        if isinstance(schedule, sparsity_schedules.PeriodicSchedule):
            if steps := schedule.update_steps():
                length = schedule.update_freq
                self.scheduler = PhasesSchedule(steps[0], steps[-1], length, length)
        # The one update of `OneShotSchedule` begins a sparse phase that lasts to the end. With `NoUpdateSchedule`
        # training stays dense.
        elif not isinstance(
            schedule,
            PhasesSchedule
            | sparsity_schedules.OneShotSchedule
            | sparsity_schedules.NoUpdateSchedule,
        ):
            raise TypeError(
                f'ACDC needs a PeriodicSchedule, whose update_freq is the length of a phase; got {schedule!r}'
            )

    def check_type(self, sparsity_type, where=''):
        """Refuses channels that are removed from all leaves."""
        checks.check_not_joint(self, sparsity_type, where)

    def check_optimizer(self, inner, params):
        """Refuses optimizers whose moments cannot be zeroed, if they are to be."""
        if self.reset_optimizer:
            sparse_state_lib.check_restartable(inner, params)

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Keeps the largest weights where a sparse phase begins, all weights where a dense one does."""
        state = super().update_state(sparse_state, params, grads, **extra_args)
        if not self.reset_optimizer or not isinstance(self.scheduler, PhasesSchedule):
            return state
        is_dense = ~jnp.asarray(self.scheduler.is_sparse(sparse_state.count))
        weights = jax.tree.map(lambda mask: jnp.broadcast_to(is_dense, mask.shape), state.masks)
        inner_state = sparse_state_lib.restart_inner_state(state.inner_state, weights)
        return state._replace(inner_state=inner_state)
