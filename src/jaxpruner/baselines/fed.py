"""The training of one cell whose batches come from the host: one compiled step, its batch spread over all devices.

While the devices compute a step, the host prepares the batch of the next one.
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

from jaxpruner.baselines.feeds import Feed, Values
from jaxpruner.baselines.programs import masks_by_path
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Workload
from jaxpruner.baselines.training import Training

AXIS = 'data'  # of the mesh: the examples of a batch
_AHEAD = 2  # steps that the host may be ahead of the devices; each holds a batch there


class Fed:
    """As `Programs`, for a task with a feed; every array has a leading axis with the one cell.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> fed = Fed(workload, recipe, workload.data(recipe, None), 'random')
    >>> fed.start(fed.targets([0.5]), [0]).key.shape
    (1,)
    """

    def __init__(self, workload: Workload, recipe: Recipe, data: Any, algorithm: str):
        """Compiles nothing yet.

        Args:
          workload: what is trained.
          recipe: its numbers.
          data: of the workload; the programs close over its arrays, the large ones come from the feed.
          algorithm: its name.
        """
        self._training = training = Training(workload, recipe, algorithm)
        self._data, self._task = data, workload.task(recipe, data)
        self._feed: Feed | None = None
        self._seed = 0
        self._start = jax.jit(
            lambda targets, seed: _many(
                training.start(_one(targets), seed, *training.init(data, seed))
            )
        )
        # The second result says when the step has been computed; the carry is given away before it could be asked.
        self._step = jax.jit(
            lambda targets, carry, number, batch: (
                training.step(data, targets, carry, number, batch),
                number + 1,
            ),
            donate_argnums=1,
        )
        self._forward = jax.jit(
            lambda targets, carries: training.forward(_one(targets), _one(carries))
        )
        self._evaluate = jax.jit(self._task.evaluate)
        if self._task.values is not None:
            values = self._task.values
            self._values = jax.jit(
                lambda targets, carry, observations: values(
                    training.forward(targets, carry), observations
                )
            )

    def open(self, seeds: Sequence[int]) -> Feed:
        """Makes the feed, which `advance` then draws from; the one before is closed.

        Args:
          seeds: of the one cell.

        Returns:
          The feed, at its beginning.
        """
        self.close()
        (self._seed,) = seeds
        assert self._task.feed is not None, 'Programs trains tasks without a feed'
        self._feed = self._task.feed(self._seed)
        return self._feed

    def close(self) -> None:
        """Closes the feed."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def targets(self, sparsities: Sequence[float]) -> Any:
        """As `Programs.targets`.

        Args:
          sparsities: of the one cell.
        """
        (sparsity,) = sparsities
        return jax.tree.map(
            lambda leaf: jnp.float32(leaf)[None], self._training.targets(self._data, sparsity)
        )

    def start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        """As `Programs.start`.

        Args:
          targets: from `targets`.
          seeds: of the one cell.
        """
        (seed,) = seeds
        return self._start(targets, jnp.int32(seed))

    def advance(self, targets: Any, carries: Carry, first: int, stop: int) -> Carry:
        """As `Programs.advance`, with the batches of the feed that `open` made.

        Args:
          targets: from `targets`.
          carries: before step `first`.
          first: the first step; the feed is there, too.
          stop: past the last.
        """
        assert self._feed is not None, 'open comes before advance'
        target, carry = _ONE((targets, carries))
        begun: collections.deque[jax.Array] = collections.deque()
        for number in range(first, stop):
            batch = self._feed.next(self._bound(target, carry))
            examples = NamedSharding(self._mesh(batch), PartitionSpec(AXIS))
            same = NamedSharding(examples.mesh, PartitionSpec())
            batch, (target, carry) = (
                jax.device_put(batch, examples),
                jax.device_put((target, carry), same),
            )
            carry, done = self._step(target, carry, np.int32(number), batch)
            begun.append(done)
            if len(begun) > _AHEAD:
                begun.popleft().block_until_ready()
        return _MANY(carry)

    def report(
        self, targets: Any, carries: Carry
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """As `Programs.report`.

        Args:
          targets: from `targets`.
          carries: of any step.
        """
        if self._task.evaluate_host is not None:
            metrics: Any = self._task.evaluate_host(
                self._bound(*_ONE((targets, carries))), self._seed
            )
        elif self._task.tests is not None:
            metrics = self._means(self._forward(targets, carries), _ONE(carries.state))
        else:
            metrics = self._evaluate(self._forward(targets, carries), _ONE(carries.state))
        return jax.tree.map(lambda leaf: np.array(leaf)[None], dict(metrics)), self.masks(carries)

    def masks(self, carries: Carry) -> dict[str, np.ndarray]:
        """As `Programs.masks`.

        Args:
          carries: of any step.
        """
        return masks_by_path(carries.opt_state)

    def prunable(self) -> dict[str, int]:
        """As `Programs.prunable`."""
        return self._training.prunable(self._data)

    def _bound(self, target: Any, carry: Carry) -> Values:
        return lambda observations: np.asarray(self._values(target, carry, observations))

    def _mesh(self, batch: Any) -> Mesh:
        """As many devices as can have the same number of examples each."""
        examples = len(jax.tree.leaves(batch)[0])
        devices = _usable(examples)
        if devices < jax.local_device_count():
            _warn_of_idle_devices(examples, devices)
        return _mesh_of(devices)

    def _means(self, params: Any, state: Any) -> dict[str, Any]:
        """The means of metrics over the test batches; one that is shorter than the first is filled up."""
        assert self._task.tests is not None
        totals: dict[str, float] = {}
        size = examples = 0
        for batch in self._task.tests():
            count = len(jax.tree.leaves(batch)[0])
            size, examples = size or count, examples + count
            full = _filled_up(batch, size)
            sharding = NamedSharding(_mesh_of(_usable(size)), PartitionSpec(AXIS))
            params, state = jax.device_put(
                (params, state), NamedSharding(sharding.mesh, PartitionSpec())
            )
            found = self._evaluate(params, state, jax.device_put(full, sharding))
            for name, values in found.items():
                totals[name] = totals.get(name, 0.0) + float(
                    np.asarray(values, np.float64)[:count].sum()
                )
        return {name: np.float32(total / examples) for name, total in totals.items()}


def _usable(examples: int) -> int:
    return math.gcd(examples, jax.local_device_count())


@functools.cache
def _mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))


@functools.cache
def _warn_of_idle_devices(examples: int, used: int) -> None:
    """Says so once."""
    warnings.warn(
        f'{used} of {jax.local_device_count()} devices are used: batches of {examples} examples cannot be spread over '
        f'all; choose batches whose size {jax.local_device_count()} divides',
        stacklevel=4,
    )


def _filled_up(batch: Any, size: int) -> Any:
    return jax.tree.map(
        lambda leaf: np.pad(leaf, [(0, size - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)]), batch
    )


def _one(cells: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], cells)


def _many(cell: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], cell)


_ONE, _MANY = jax.jit(_one), jax.jit(_many)  # one program for all leaves
