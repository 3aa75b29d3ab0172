"""The training of many cells with one algorithm as compiled programs: one after another, under `lax.map`, or `vmap`."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.task import Carry
from jaxpruner.baselines.training import Training, zeros_of

Over = Literal['each', 'map', 'vmap']
OVERS: tuple[Over, ...] = get_args(Over)
_SNAPSHOT_KERNELS = 2
_MEASURED_STEPS, _MEASURED_ROUNDS = 5, 3


class Programs:
    """The compiled functions of one algorithm; every array has a leading axis of cells.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 2, 'model': {'hidden': [4]}})
    >>> programs = Programs(Training(workload, recipe, 'random'), workload.data(recipe, None), 'map')
    >>> carries = programs.advance(programs.targets([0.5, 0.8]), programs.start(programs.targets([0.5, 0.8]), [0, 0]), 0, 2)
    >>> carries.key.shape
    (2,)
    """

    def __init__(self, training: Training, data: Any, over: Over):
        """Compiles nothing yet.

        Args:
          training: with its algorithm.
          data: of the workload.
          over: 'map' and 'each' train one cell after the other (a sweep hands over one at a time with 'each'), 'vmap'
            all at once.
        """
        self._training, self._data = training, data
        spread = self._vmap if over == 'vmap' else self._map
        self._start = jax.jit(lambda data, targets, seeds: spread(training.start, data)(targets, seeds))
        self._advance = jax.jit(
            lambda data, targets, carries, first, stop: spread(training.advance, data)(
                targets, carries, first=first, stop=stop
            ),
            donate_argnums=2,
        )
        self._report = jax.jit(lambda data, targets, carries: spread(self._report_one, data)(targets, carries))

    def targets(self, sparsities: Sequence[float]) -> Any:
        """The target of each leaf for each cell.

        Args:
          sparsities: one for each cell.

        Returns:
          A tree like the parameters of float32[cells], `None` where dense.
        """
        trees = [self._training.targets(self._data, sparsity) for sparsity in sparsities]
        return jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.float32), *trees)

    def start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        """The carries before the first step.

        Args:
          targets: from `targets`.
          seeds: one for each cell.
        """
        return self._start(self._data, targets, jnp.asarray(seeds, jnp.int32))

    def abstract_start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        """The shapes of what `start` returns.

        Args:
          targets: from `targets`.
          seeds: one for each cell.
        """
        return jax.eval_shape(self._start, self._data, targets, jnp.asarray(seeds, jnp.int32))

    def advance(self, targets: Any, carries: Carry, first: int, stop: int) -> Carry:
        """Trains all cells from a step up to another; the carries given are used up.

        Args:
          targets: from `targets`.
          carries: before step `first`.
          first: the first step.
          stop: past the last.
        """
        return self._advance(self._data, targets, carries, jnp.int32(first), jnp.int32(stop))

    def report(self, targets: Any, carries: Carry) -> tuple[dict, dict, dict]:
        """What is known of the cells now.

        Args:
          targets: from `targets`.
          carries: of any step.

        Returns:
          Metrics by name, float[cells]; sparsities by leaf path, float32[cells]; masks of up to two kernels by leaf
          path, uint8[cells, …leaf shape], none for an algorithm without masks.
        """
        return jax.device_get(self._report(self._data, targets, carries))

    def _report_one(self, data: Any, targets: Any, carry: Carry) -> tuple[dict, dict, dict]:
        params = self._training.forward(targets, carry)
        kernels = self._training.kernels(data, params)
        metrics = dict(self._training.evaluate(data, params, carry.state))
        paths = [tree_lib.path_string(path) for path in tree_lib.flatten_with_paths(targets)[0]]
        masks = {path: (kernels[path] != 0).astype(jnp.uint8) for path in _shown(paths, kernels)}
        return metrics, zeros_of(kernels), masks

    @staticmethod
    def _map(function: Callable, data: Any) -> Callable:
        # A cell alone needs no loop around it.
        def mapped(*arrays: Any, **same: Any) -> Any:
            call = functools.partial(function, data, **same)
            if jax.tree.leaves(arrays)[0].shape[0] == 1:
                return jax.tree.map(lambda leaf: leaf[None], call(*jax.tree.map(lambda leaf: leaf[0], arrays)))
            return jax.lax.map(lambda one: call(*one), arrays)

        return mapped

    @staticmethod
    def _vmap(function: Callable, data: Any) -> Callable:
        return lambda *arrays, **same: jax.vmap(lambda *one: function(data, *one, **same))(*arrays)


def choose_over(training: Training, data: Any, cells: int) -> Over:
    """Measures which way of training several cells is the fastest here.

    Args:
      training: of the dense model; the others differ little.
      data: of the workload.
      cells: how many are trained in one program.

    Returns:
      The way with the smallest time for a few steps of all cells; 'map' for a single cell.

    >>> choose_over(None, None, cells=1)
    'map'
    """
    if cells == 1:
        return 'map'
    seconds: dict[Over, list[float]] = {over: [] for over in OVERS}
    runs = {over: _measured(training, data, over, cells) for over in OVERS}
    for _ in range(_MEASURED_ROUNDS):
        for over, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[over].append(time.perf_counter() - began)
    return min(OVERS, key=lambda over: float(np.median(seconds[over])))


def _measured(training: Training, data: Any, over: Over, cells: int) -> Callable[[], None]:
    """A call that trains all cells for some steps; it is compiled already."""
    programs = Programs(training, data, over)
    together = 1 if over == 'each' else cells
    targets = programs.targets([0.0] * together)
    held = [programs.start(targets, range(together)) for _ in range(cells // together)]

    def run() -> None:
        for at, carries in enumerate(held):
            held[at] = jax.block_until_ready(programs.advance(targets, carries, 0, _MEASURED_STEPS))

    run()
    return run


def _shown(pruned: Sequence[str], kernels: dict[str, Any]) -> list[str]:
    """The kernels whose masks are kept over time: the first, and the largest of the others."""
    first = [path for path in kernels if path in pruned][:1]
    others = [path for path in kernels if path in pruned and path not in first]
    return [*first, *sorted(others, key=lambda path: -kernels[path].size)][:_SNAPSHOT_KERNELS]
