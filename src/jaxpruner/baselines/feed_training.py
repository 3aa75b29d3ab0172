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

from jaxpruner.baselines.cell_logs import Masks
from jaxpruner.baselines.cell_mapping import add_cell_axis, drop_cell_axis
from jaxpruner.baselines.compiled_training import Report, masks_by_path
from jaxpruner.baselines.feeds import Feed, Values
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Workload
from jaxpruner.baselines.training import Training

AXIS = 'data'  # of the mesh: the examples of a batch
_AHEAD = 2  # steps that the host may be ahead of the devices; each holds a batch there
# One program each for all leaves.
_ADD_AXIS = jax.jit(add_cell_axis)
_DROP_AXIS = jax.jit(drop_cell_axis)


class FeedTraining:
    """As `CompiledTraining`, for a task with a feed; arrays have a leading axis with the one cell."""

    def __init__(self, workload: Workload, recipe: Recipe, data: Any, algorithm: str):
        self._training = training = Training(workload, recipe, algorithm)
        self._data = data
        self._task = workload.task(recipe, data)
        self._feed: Feed | None = None
        self._seed = 0

        def start(targets, seed):
            params, state = training.init(data, seed)
            carry = training.start(drop_cell_axis(targets), seed, params, state)
            return add_cell_axis(carry)

        # The second result says when the step is done; the carry is donated to the next step.
        def step(targets, carry, number, batch):
            next_carry = training.step(data, targets, carry, number, batch)
            return next_carry, number + 1

        def forward(targets, carries):
            return training.forward(drop_cell_axis(targets), drop_cell_axis(carries))

        def values(targets, carry, observations):
            assert self._task.values is not None, 'the feed asks for values; the task has none'
            params = training.forward(targets, carry)
            return self._task.values(params, observations)

        # The programs close over the data's arrays; the large ones come from the feed.
        self._start = jax.jit(start)
        self._forward = jax.jit(forward)
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
        return add_cell_axis(jax.tree.map(jnp.float32, targets))

    def start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        (seed,) = seeds
        return self._start(targets, jnp.int32(seed))

    def advance(self, targets: Any, carries: Carry, first: int, stop: int) -> Carry:
        """As `CompiledTraining.advance`; the feed that `open` made stands at step `first`, too."""
        assert self._feed is not None, 'open comes before advance'
        target, carry = _DROP_AXIS((targets, carries))
        running: collections.deque[jax.Array] = collections.deque()
        for number in range(first, stop):
            values = self._bound_values(target, carry)
            batch = self._feed.next(values)
            mesh = _mesh_for(batch)
            batch = _spread(batch, mesh)
            target, carry = _replicate((target, carry), mesh)
            carry, done = self._step(target, carry, np.int32(number), batch)
            running.append(done)
            if len(running) > _AHEAD:
                running.popleft().block_until_ready()
        return _ADD_AXIS(carry)

    def report(self, targets: Any, carries: Carry) -> Report:
        metrics = jax.tree.map(np.array, self._metrics(targets, carries))
        return Report(add_cell_axis(metrics), self.masks(carries))

    def masks(self, carries: Carry) -> Masks:
        return masks_by_path(carries.opt_state)

    def prunable(self) -> dict[str, int]:
        return self._training.prunable(self._data)

    def _bound_values(self, target: Any, carry: Carry) -> Values:
        def values(observations):
            return np.asarray(self._values(target, carry, observations))

        return values

    def _metrics(self, targets: Any, carries: Carry) -> dict[str, Any]:
        if self._task.evaluate_host is not None:
            target, carry = _DROP_AXIS((targets, carries))
            values = self._bound_values(target, carry)
            return dict(self._task.evaluate_host(values, self._seed))
        params = self._forward(targets, carries)
        state = _DROP_AXIS(carries.state)
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
            size = size or count
            examples += count
            mesh = _mesh_of(_usable_devices(size))
            padded = _spread(_pad(batch, size), mesh)
            params, state = _replicate((params, state), mesh)
            metrics = self._evaluate(params, state, padded)
            for name, values in metrics.items():
                unpadded = np.asarray(values, np.float64)[:count]
                totals[name] = totals.get(name, 0.0) + float(unpadded.sum())
        means = {}
        for name, total in totals.items():
            means[name] = np.float32(total / examples)
        return means


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
    used = jax.local_devices()[:devices]
    return Mesh(np.array(used), (AXIS,))


def _spread(batch: Any, mesh: Mesh) -> Any:
    """The batch with as many examples on each device."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))


def _replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree with a copy on each device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


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
