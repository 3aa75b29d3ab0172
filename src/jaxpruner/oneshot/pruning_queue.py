"""Calibrated matrices in the order that frees most memory first."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jaxpruner.oneshot.calibration import CalibratedMatrices
from jaxpruner.oneshot.weight_matrices import WeightMatrices


@dataclasses.dataclass
class _Shared:
    """Statistics, or what a pruner has prepared of them, and how many matrices still wait for them."""

    statistics: Any
    users: int = 0
    is_prepared: bool = False


class PruningQueue:
    """Takes matrices that can free the memory of their statistics first; pruning takes the memory of leaf and mask.

    `prepare` is called once for all matrices that share statistics. Nothing else may hold the statistics then.
    """

    def __init__(
        self,
        entries: Iterable[CalibratedMatrices],
        prepare: Callable[[Any], Any] | None = None,
    ):
        self._prepare = prepare
        shared: dict[int, _Shared] = {}
        self._waiting: list[tuple[WeightMatrices, _Shared]] = []
        for matrices, statistics in entries:
            holder = shared.setdefault(id(statistics), _Shared(statistics))
            holder.users += 1
            self._waiting.append((matrices, holder))

    def __iter__(self) -> Iterator[CalibratedMatrices]:
        while self._waiting:
            yield self._take()

    def _take(self) -> CalibratedMatrices:
        numbers = range(len(self._waiting))
        matrices, shared = self._waiting.pop(max(numbers, key=self._freed_bytes))
        if self._prepare is not None and not shared.is_prepared:
            shared.statistics = self._prepare(shared.statistics)
            shared.is_prepared = True
        shared.users -= 1
        return CalibratedMatrices(matrices, shared.statistics)

    def _freed_bytes(self, number: int) -> float:
        matrices, shared = self._waiting[number]
        held = 0
        for array in jax.tree.leaves(shared.statistics):
            held += getattr(array, 'nbytes', 0)
        # Beside float32 weights there is a byte for each element of the mask.
        return held / shared.users - 5 * math.prod(matrices.layout.shape)
