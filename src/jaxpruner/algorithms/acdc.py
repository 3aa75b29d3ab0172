"""AC/DC: dense and sparse phases in turn."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, optimizer_state, scoring, sparsity_schedules
from jaxpruner.algorithms import pruners

# One update begins the only phase, a sparse one; none leaves training dense.
_SCHEDULES = (
    sparsity_schedules.PeriodicSchedule,
    sparsity_schedules.OneShotSchedule,
    sparsity_schedules.NoUpdateSchedule,
)


@dataclasses.dataclass
class ACDC(base_updater.BaseUpdater):
    """Alternating compressed and decompressed training. Peste et al., 2021.

    Training starts dense. Each update of the (periodic) scheduler begins a phase, in turn a sparse one with the masks
    of the largest weights, and a dense one in which all weights are trained. The last update begins a sparse phase
    that lasts to the end. Without `update_end_step` phases go on for ever.

    Attributes:
      scheduler: a `PeriodicSchedule`: `update_freq` is the length of a phase.
      reset_optimizer: the optimizer's moments become zero where a phase begins dense.

    Raises:
      TypeError: the scheduler is not periodic.

    >>> schedule = sparsity_schedules.PeriodicSchedule(update_freq=10, update_start_step=10, update_end_step=40)
    >>> updater = ACDC(schedule)
    >>> [bool(updater.begins_sparse(step)) for step in (10, 20, 30, 40)]
    [True, False, True, True]
    """

    approaches_target: ClassVar[bool] = False

    reset_optimizer: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.scheduler, _SCHEDULES):
            raise TypeError(
                f'ACDC needs a PeriodicSchedule, whose update_freq is the length of a phase; got {self.scheduler!r}'
            )

    def begins_sparse(self, step):
        """Whether the phase that an update at `step` begins is sparse.

        Args:
          step: int32 scalar, an update step.

        Returns:
          A bool scalar: true of the first update, the third and so on, and of the last.
        """
        schedule = self.scheduler
        if not isinstance(schedule, sparsity_schedules.PeriodicSchedule):
            return jnp.bool_(True)
        first = -(-schedule.update_start_step // schedule.update_freq)
        sparse = (jnp.asarray(step) // schedule.update_freq - first) % 2 == 0
        if schedule.update_end_step is not None:
            sparse |= jnp.asarray(step) + schedule.update_freq > schedule.update_end_step
        return sparse

    def check_optimizer(self, inner, params):
        """Refuses optimizers whose moments cannot be zeroed, if they are to be."""
        if self.reset_optimizer:
            optimizer_state.check_resettable(inner, params)

    @scoring.of_each_weight(jnp.abs)
    def calculate_scores(self, params, sparse_state=None, grads=None):
        """The magnitudes."""
        del sparse_state, grads
        return pruners.magnitudes(params)

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Masks of the largest weights where a sparse phase begins, of all weights where a dense one does."""
        sparse = self.begins_sparse(sparse_state.count)
        # A phase is at its target at once, whatever grows in the schedule.
        targets = jax.tree.map(lambda target: jnp.where(sparse, target, 0.0), sparse_state.target_sparsities)
        scores = scoring.to_rank(self, params, sparse_state, grads, extra_args)
        return sparse_state._replace(masks=self.create_masks(scores, targets))

    def moments_to_reset(self, old_state, new_state):
        """All weights where a dense phase begins."""
        if not self.reset_optimizer:
            return None
        dense = ~self.begins_sparse(old_state.count)
        return jax.tree.map(lambda mask: jnp.broadcast_to(dense, mask.shape), new_state.masks)
