"""When blocks or single weights are dropped and grown, and how many."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpruner import checks, seeds, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.checks import check_drop_fraction
from jaxpruner.sparse.training.growing import ALGORITHMS, STATIC

_CHECKED_STEPS = 4  # first and last update steps whose drop fraction is checked beforehand


@dataclasses.dataclass(frozen=True)
class MoveSettings:
    """When blocks or single weights are dropped, how many, and how others are grown.

    Attributes:
      algorithm: says which are grown: `'static_sparse'`, `'set'` or `'rigl'`.
      scheduler: says in which steps; its sparsity has to stay the same.
      drop_fraction_fn: step -> the share of the stored blocks or weights of each matrix that is dropped.
      rng_seed: the seed of positions drawn at random.

    Raises:
      ValueError: an unknown algorithm, a schedule whose sparsity changes, a fraction outside [0, 1] at one of the
        update steps that are checked.
    """

    algorithm: str
    scheduler: sparsity_schedules.BaseSchedule
    drop_fraction_fn: Callable[[Any], Any]
    rng_seed: int

    def __post_init__(self):
        if self.algorithm not in ALGORITHMS:
            near = tree_lib.nearest(str(self.algorithm), ALGORITHMS)
            raise ValueError(f'algorithm {self.algorithm!r} does not train compact weights; {near}')
        _check_constant_sparsity(self.scheduler)
        seeds.check_seed(self.rng_seed)
        for step in _steps_to_check(self.scheduler):
            self.drop_fraction(step)

    @property
    def ever_moves(self) -> bool:
        """Whether anything is ever dropped."""
        never = isinstance(self.scheduler, sparsity_schedules.NoUpdateSchedule)
        return self.algorithm != STATIC and not never

    def drop_fraction(self, step: Any) -> Any:
        """The share that is dropped at a step.

        Raises:
          ValueError: it lies outside [0, 1]; a traced one is not checked.
          TypeError: it is no number.
        """
        fraction = self.drop_fraction_fn(step)
        check_drop_fraction(fraction, f'drop_fraction_fn({step})')
        return fraction

    def host_rng(self, number: int) -> np.random.Generator:
        """NumPy's random numbers for the leaf of this number.

        Raises:
          TypeError: the seed is being traced.
        """
        if tree_lib.is_traced(self.rng_seed):
            raise TypeError(
                'rng_seed is traced, and positions are drawn by NumPy; make the model outside of jit'
            )
        if self.rng_seed is None or isinstance(self.rng_seed, jax.Array | np.ndarray):
            key = seeds.prng_key(self.rng_seed)
            words = np.asarray(jax.random.key_data(key)).tolist()
            return np.random.default_rng([*words, number])
        return np.random.default_rng([self.rng_seed, number])


def _steps_to_check(scheduler: sparsity_schedules.BaseSchedule) -> list[int]:
    """Steps at which the drop fraction is checked beforehand: 0, the first updates, and the last ones.

    If the schedule has no end, the last ones are left out: nobody knows how long a training is.
    """
    steps = checks.update_steps(scheduler)
    if steps is None:  # not known in Python
        return list(range(_CHECKED_STEPS))
    steps_to_check = {0, *steps[:_CHECKED_STEPS]}
    if getattr(scheduler, 'update_end_step', 0) is not None:
        steps_to_check.update(steps[-_CHECKED_STEPS:])
    return sorted(steps_to_check)


def _check_constant_sparsity(scheduler: sparsity_schedules.BaseSchedule) -> None:
    """Refuses a schedule whose sparsity changes: compact arrays have the same size at every step."""
    target = 0.5
    for step in (0, 1, 1000):
        sparsity = float(scheduler.get_sparsity_at_step(target, step))
        if sparsity != target:
            raise ValueError(
                f'scheduler: {type(scheduler).__name__} changes the number of weights (it makes {sparsity:.3g} of the '
                f'target {target} at step {step}), and compact arrays keep their size; use PeriodicSchedule or '
                'StepsSchedule'
            )
