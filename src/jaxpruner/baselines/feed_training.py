"""The training of one cell whose batches come from a feed on the host.

One step is compiled, and its batch is spread over all devices. While the devices compute a step,
the host prepares the batch of the next one.
"""

import collections
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpruner.baselines.cell_mapping import add_cell_axis, drop_cell_axis
from jaxpruner.baselines.compiled_training import masks_by_path
from jaxpruner.baselines.feeds import Feed, Values
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Workload
from jaxpruner.baselines.training import Training

AXIS = 'data'  # of the mesh: the examples of a batch
_AHEAD = 2  # steps that the host may be ahead of the devices; each holds a batch there
_ADD_AXIS, _DROP_AXIS = (
    jax.jit(add_cell_axis),
    jax.jit(drop_cell_axis),
)  # one program for all leaves


class FeedTraining:
    """As `CompiledTraining`, for a task with a feed; arrays have a leading axis with the one cell."""

    def __init__(self, workload: Workload, recipe: Recipe, data: Any, algorithm: str):
        self._training = training = Training(workload, recipe, algorithm)
        self._data, self._task = data, workload.task(recipe, data)
        self._feed: Feed | None = None
        self._seed = 0

        def start(targets, seed):
            params, state = training.init(data, seed)
            return add_cell_axis(training.start(drop_cell_axis(targets), seed, params, state))

        # The second result says when the step is done; the carry is donated to the next step.
        def step(targets, carry, number, batch):
            return training.step(data, targets, carry, number, batch), number + 1

        def forward(targets, carries):
            return training.forward(drop_cell_axis(targets), drop_cell_axis(carries))

        def values(targets, carry, observations):
            assert self._task.values is not None, 'the feed asks for values; the task has none'
            return self._task.values(training.forward(targets, carry), observations)

        # The programs close over the data's arrays; the large ones come from the feed.
        self._start, self._forward = jax.jit(start), jax.jit(forward)
        self._step = jax.jit(step, donate_argnums=1)
        self._evaluate = jax.jit(self._task.evaluate)
        self._values = jax.jit(values)

    def open(self, seeds: Sequence[int]) -> Feed:
        """Makes a feed at its beginning, from which `advance` draws; closes the one before."""
        self.close()
        (self._seed,) = seeds
        assert self._task.feed is not None, 'CompiledTraining trains tasks without a feed'
        self._feed = self._task.feed(self._seed)
        return self._feed

    def close(self) -> None:
        """Closes the feed."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def targets(self, sparsities: Sequence[float]) -> Any:
        (sparsity,) = sparsities
        targets = self._training.targets(self._data, sparsity)
        return jax.tree.map(lambda leaf: jnp.float32(leaf)[None], targets)

    def start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        (seed,) = seeds
        return self._start(targets, jnp.int32(seed))

    def advance(self, targets: Any, carries: Carry, first: int, stop: int) -> Carry:
        """As `CompiledTraining.advance`; the feed that `open` made stands at step `first`, too."""
        assert self._feed is not None, 'open comes before advance'
        target, carry = _DROP_AXIS((targets, carries))
        running: collections.deque[jax.Array] = collections.deque()
        for number in range(first, stop):
            batch = self._feed.next(self._bound_values(target, carry))
            mesh = _mesh_for(batch)
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))
            replicated = NamedSharding(mesh, PartitionSpec())
            target, carry = jax.device_put((target, carry), replicated)
            carry, done = self._step(target, carry, np.int32(number), batch)
            running.append(done)
            if len(running) > _AHEAD:
                running.popleft().block_until_ready()
        return _ADD_AXIS(carry)

    def report(
        self, targets: Any, carries: Carry
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        metrics = jax.tree.map(np.array, self._metrics(targets, carries))
        return add_cell_axis(metrics), self.masks(carries)

    def masks(self, carries: Carry) -> dict[str, np.ndarray]:
        return masks_by_path(carries.opt_state)

    def prunable(self) -> dict[str, int]:
        return self._training.prunable(self._data)

    def _bound_values(self, target: Any, carry: Carry) -> Values:
        return lambda observations: np.asarray(self._values(target, carry, observations))

    def _metrics(self, targets: Any, carries: Carry) -> dict[str, Any]:
        if self._task.evaluate_host is not None:
            target, carry = _DROP_AXIS((targets, carries))
            return dict(self._task.evaluate_host(self._bound_values(target, carry), self._seed))
        params, state = self._forward(targets, carries), _DROP_AXIS(carries.state)
        if self._task.tests is not None:
            return self._mean_metrics(params, state)
        return dict(self._evaluate(params, state))

    def _mean_metrics(self, params: Any, state: Any) -> dict[str, Any]:
        """Means of the metrics over the test batches; a shorter batch is padded to the first's size."""
        assert self._task.tests is not None
        totals: dict[str, float] = {}
        size = examples = 0
        for batch in self._task.tests():
            count = _count_examples(batch)
            size, examples = size or count, examples + count
            mesh = _mesh_of(_usable_devices(size))
            padded = jax.device_put(_pad(batch, size), NamedSharding(mesh, PartitionSpec(AXIS)))
            params, state = jax.device_put((params, state), NamedSharding(mesh, PartitionSpec()))
            for name, values in self._evaluate(params, state, padded).items():
                total = np.asarray(values, np.float64)[:count].sum()
                totals[name] = totals.get(name, 0.0) + float(total)
        return {name: np.float32(total / examples) for name, total in totals.items()}


def _count_examples(batch: Any) -> int:
    return len(jax.tree.leaves(batch)[0])


def _usable_devices(examples: int) -> int:
    return math.gcd(examples, jax.local_device_count())


def _mesh_for(batch: Any) -> Mesh:
    """As many devices as can have the same number of examples each."""
    examples = _count_examples(batch)
    devices = _usable_devices(examples)
    if devices < jax.local_device_count():
        _warn_of_idle_devices(examples, devices)
    return _mesh_of(devices)


@functools.cache
def _mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))


@functools.cache
def _warn_of_idle_devices(examples: int, used: int) -> None:
    """Warns once."""
    devices = jax.local_device_count()
    warnings.warn(
        f'{used} of {devices} devices are used: batches of {examples} examples cannot be spread '
        f'over all; choose batches whose size {devices} divides',
        stacklevel=4,
    )


def _pad(batch: Any, size: int) -> Any:
    def pad_leaf(leaf):
        widths = [(0, 0)] * leaf.ndim
        widths[0] = (0, size - len(leaf))
        return np.pad(leaf, widths)

    return jax.tree.map(pad_leaf, batch)
