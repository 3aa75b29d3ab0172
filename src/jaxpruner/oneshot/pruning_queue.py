"""Calibrated matrices in the order that frees most memory first."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.oneshot.calibration import CalibratedMatrices
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.weight_matrices import WeightMatrices


class QueuedMatrices(NamedTuple):
    """Matrices whose turn it is, with statistics or with what is prepared of them.

    Attributes:
      matrices: how the model reads them from the leaf.
      statistics: of their inputs; `None` once they are prepared.
      prepared: what the pruner's `prepare` made of the statistics; `None` before.
      is_unseen: bool, one for each matrix: whether all of its inputs were always zero.
    """

    matrices: WeightMatrices
    statistics: InputStatistics | None
    prepared: Any
    is_unseen: jax.Array


@dataclasses.dataclass
class _Shared:
    """Statistics, or what is prepared of them, and how many matrices still wait for them."""

    statistics: InputStatistics | None
    is_unseen: jax.Array
    prepared: Any = None
    users: int = 0


class PruningQueue:
    """Takes matrices that can free the memory of their statistics first; pruning takes the memory of leaf and mask.

    `prepare` is called once for all matrices that share statistics. Nothing else may hold the statistics then.
    """

    def __init__(
        self,
        entries: Iterable[CalibratedMatrices],
        prepare: Callable[[InputStatistics], Any] | None = None,
    ):
        self._prepare = prepare
        shared: dict[int, _Shared] = {}
        self._waiting: list[tuple[WeightMatrices, _Shared]] = []
        for matrices, statistics in entries:
            holder = shared.get(id(statistics))
            if holder is None:
                is_unseen = _is_unseen(statistics.second_moment)
                holder = shared[id(statistics)] = _Shared(statistics, is_unseen)
            holder.users += 1
            self._waiting.append((matrices, holder))

    def __iter__(self) -> Iterator[QueuedMatrices]:
        while self._waiting:
            yield self._take()

    def _take(self) -> QueuedMatrices:
        numbers = range(len(self._waiting))
        matrices, shared = self._waiting.pop(max(numbers, key=self._freed_bytes))
        if self._prepare is not None and shared.statistics is not None:
            shared.prepared = self._prepare(shared.statistics)
            shared.statistics = None
        shared.users -= 1
        return QueuedMatrices(matrices, shared.statistics, shared.prepared, shared.is_unseen)

    def _freed_bytes(self, number: int) -> float:
        matrices, shared = self._waiting[number]
        held = 0
        for array in jax.tree.leaves((shared.statistics, shared.prepared)):
            held += getattr(array, 'nbytes', 0)
        # Beside float32 weights there is a byte for each element of the mask.
        return held / shared.users - 5 * math.prod(matrices.layout.shape)


@jax.jit
def _is_unseen(second_moment: jax.Array) -> jax.Array:
    return jnp.all(second_moment == 0, -1)
