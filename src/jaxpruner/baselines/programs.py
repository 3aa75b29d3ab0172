"""The compiled programs of a training: of many cells at once, or of one whose batches come from the host."""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Feed, Values, Workload
from jaxpruner.baselines.training import DENSE, Training
from jaxpruner.sparse_state import sparse_states

Masks = dict[str, np.ndarray]  # by leaf path
_AXIS = 'data'  # of the mesh: the examples of a batch
_AHEAD = 2  # steps that the host may be ahead of the devices; each holds a batch there


def map_over_cells(over: Literal['map', 'vmap'], function: Callable[..., Any]) -> Callable:
    """Makes a function of many cells out of a function of one; it is to be compiled.

    >>> map_over_cells('vmap', lambda x: 2 * x)(jax.numpy.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """

    def mapped(*arrays):
        if over == 'vmap':
            return jax.vmap(function)(*arrays)
        if _length(arrays) == 1:  # a single cell needs no loop around it
            only = function(*jax.tree.map(lambda leaf: leaf[0], arrays))
            return jax.tree.map(lambda leaf: leaf[None], only)
        return jax.lax.map(lambda cell: function(*cell), arrays)

    return mapped


class Programs:
    """The compiled functions of a sweep; arrays have a leading axis of cells.

    Cells of an algorithm train together: one after another on a CPU, where nothing else is faster, and under `vmap`
    elsewhere. A task with a feed trains one cell, whose batches are spread over all devices.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        data: Any,
        over: Literal['map', 'vmap'] | None = None,
    ):
        self.task = workload.task(recipe, data)
        self._settings = workload, recipe
        self._data = data
        if self.task.feed is not None:
            over = 'map'
        elif over is None:
            over = 'map' if jax.default_backend() == 'cpu' else 'vmap'
        # Data are an argument of the programs, which would contain them otherwise; readers of a feed are no arrays.
        self._arrays = None if self.task.feed else data

        def mapped(function, *arrays):
            return map_over_cells(over, function)(*arrays)

        def given(data):
            return self._data if self.task.feed else data

        def init(data, seeds):
            training = self._training(DENSE)
            return mapped(lambda seed: training.init(given(data), seed), seeds)

        def start(algorithm, *arrays):
            return mapped(self._training(algorithm).start, *arrays)

        def forward(algorithm, targets, carries):
            return mapped(self._training(algorithm).forward, targets, carries)

        def advance(algorithm, data, targets, carries, first, stop):
            def advance_one(targets, carry):
                training = self._training(algorithm)
                return training.advance(given(data), targets, carry, first, stop)

            return mapped(advance_one, targets, carries)

        # The second result says when the step is done; the carry is donated to the next step.
        def step(algorithm, targets, carries, number, batch):
            def step_one(targets, carry):
                return self._training(algorithm).step(self._data, targets, carry, number, batch)

            return mapped(step_one, targets, carries), number + 1

        def evaluate(data, params, state, *batch):
            def evaluate_one(params, state):
                task = workload.task(recipe, given(data))
                return task.evaluate(params, state, *batch)

            return mapped(evaluate_one, params, state)

        def values(algorithm, targets, carries, observations):
            own = self.task.values
            assert own is not None, 'the feed asks for values; the task has none'
            params = forward(algorithm, targets, carries)
            return mapped(lambda params: own(params, observations), params)[0]

        self._init = jax.jit(init)
        self._start = jax.jit(start, static_argnums=0)
        self._forward = jax.jit(forward, static_argnums=0)
        self._advance = jax.jit(advance, static_argnums=0, donate_argnums=3)
        self._step = jax.jit(step, static_argnums=0, donate_argnums=2)
        self._evaluate = jax.jit(evaluate)
        self._values = jax.jit(values, static_argnums=0)

    def targets(self, algorithm: str, sparsities: Sequence[float]) -> Any:
        """The target of each leaf for each cell: float32[cells], `None` where dense."""
        training = self._training(algorithm)
        trees = [training.targets(self._data, sparsity) for sparsity in sparsities]
        return jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.float32), *trees)

    def start(self, algorithm: str, targets: Any, seeds: Sequence[int]) -> Carry:
        """The carries before the first step."""
        numbers = jnp.asarray(seeds, jnp.int32)
        params, state = self._init(self._arrays, numbers)
        return self._start(algorithm, targets, numbers, params, state)

    def advance(
        self,
        algorithm: str,
        targets: Any,
        carries: Carry,
        first: int,
        stop: int,
        feed: Feed | None = None,
    ) -> Carry:
        """Trains from step `first`, at which the feed stands, too, up to `stop`; the carries given are used up."""
        if feed is None:
            # Arrays, not constants: one program serves chunks of any length.
            bounds = jnp.int32(first), jnp.int32(stop)
            return self._advance(algorithm, self._arrays, targets, carries, *bounds)
        running: collections.deque[jax.Array] = collections.deque()
        for number in range(first, stop):
            batch = feed.next(self._bound_values(algorithm, targets, carries))
            (targets, carries), batch = _spread((targets, carries), batch)
            carries, done = self._step(algorithm, targets, carries, np.int32(number), batch)
            running.append(done)
            if len(running) > _AHEAD:
                running.popleft().block_until_ready()
        return carries

    def report(
        self, algorithm: str, targets: Any, carries: Carry, seeds: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """What the cells have come to: metrics by name, float[cells]."""
        if self.task.evaluate_host is not None:
            values = self._bound_values(algorithm, targets, carries)
            metrics = self.task.evaluate_host(values, *seeds)
            return {name: np.array([value]) for name, value in metrics.items()}
        params = self._forward(algorithm, targets, carries)
        if self.task.tests is None:
            metrics = self._evaluate(self._arrays, params, carries.state)
            return jax.tree.map(np.array, dict(metrics))
        # Means over the test batches; a shorter batch is padded to the first's size.
        totals: dict[str, float] = {}
        size = examples = 0
        for batch in self.task.tests():
            count = _length(batch)
            size = size or count
            examples += count
            padded = jax.tree.map(functools.partial(_padded, size), batch)
            model, whole = _spread((params, carries.state), padded)
            for name, each in self._evaluate(None, *model, whole).items():
                total = float(np.asarray(each, np.float64)[0, :count].sum())
                totals[name] = totals.get(name, 0.0) + total
        return {name: np.array([total / examples], np.float32) for name, total in totals.items()}

    def prunable(self) -> dict[str, int]:
        """The number of weights of each leaf that may be pruned, by path."""
        return self._training(DENSE).prunable(self._data)

    def _training(self, algorithm: str) -> Training:
        return Training(*self._settings, algorithm)

    def _bound_values(self, algorithm: str, targets: Any, carries: Carry) -> Values:
        return lambda observations: np.asarray(
            self._values(algorithm, targets, carries, observations)
        )


def masks_by_path(opt_state: Any) -> Masks:
    """Copies of the masks in an optimizer's state, by the path of their leaf; dense leaves have none."""
    masks = {}
    for state in sparse_states(opt_state):
        paths, leaves, _ = tree_lib.flatten_with_paths(state.masks)
        for path, leaf in zip(paths, leaves, strict=True):
            # A copy: an array of the host may share the memory of carries, which are donated.
            masks[tree_lib.path_string(path)] = np.array(leaf)
    return masks


def _length(batch: Any) -> int:
    return len(jax.tree.leaves(batch)[0])


def _padded(size: int, leaf: Any) -> Any:
    return np.pad(leaf, [(0, size - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))


def _spread(tree: Any, batch: Any) -> tuple[Any, Any]:
    """A copy of the tree for each device, and as many examples of the batch, on as many devices as divide it."""
    devices = math.gcd(_length(batch), jax.local_device_count())
    mesh = Mesh(np.array(jax.local_devices()[:devices]), (_AXIS,))
    everywhere, split = (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec(_AXIS)),
    )
    return jax.device_put(tree, everywhere), jax.device_put(batch, split)
