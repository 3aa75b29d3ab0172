"""The compiled programs of a training: of many cells at once, or of one whose batches come from the host."""

import collections
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.checkpointing import Masks
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Feed, Metrics, Values, Workload
from jaxpruner.baselines.training import DENSE, Training
from jaxpruner.sparse_state import sparse_states

CellMapping = Literal['each', 'map', 'vmap', 'devices']
CELL_MAPPINGS: tuple[CellMapping, ...] = get_args(CellMapping)
_CELLS = 'cells'


def check_mapping(name: str) -> None:
    """Raises a `ValueError` for a mapping that does not exist, or needs more devices."""
    if name not in CELL_MAPPINGS:
        raise ValueError(f'cells are trained over {", ".join(CELL_MAPPINGS)}, got {name!r}')
    if name == 'devices' and jax.local_device_count() == 1:
        raise ValueError(
            f'over {name!r} needs more than one device, here is {jax.local_device_count()}; '
            "a CPU's cores are devices with XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )


def map_over_cells(mapping: CellMapping, function: Callable, *data: Any) -> Callable:
    """Makes a function of many cells out of a function of one; it is to be compiled.

    `function` takes the data, then the arrays of a cell and, by name, what all cells share. The
    result takes no data, and its arrays have a leading axis of cells. A sweep hands cells over
    singly with 'each'.

    >>> function = lambda data, x, scale: data + scale * x
    >>> map_over_cells('vmap', function, 1.0)(jax.numpy.arange(3.0), scale=2.0).tolist()
    [1.0, 3.0, 5.0]
    """

    def train(data, shared, arrays):
        def call(*cell):
            return function(*data, *cell, **shared)

        if mapping == 'vmap':
            return jax.vmap(call)(*arrays)
        if _length(arrays) == 1:  # a single cell needs no loop around it
            return add_cell_axis(call(*drop_cell_axis(arrays)))
        return jax.lax.map(lambda cell: call(*cell), arrays)

    def mapped(*arrays, **shared):
        if mapping != 'devices':
            return train(data, shared, arrays)
        # Each device gets as many: the last cell is trained again to fill up. Outside of the
        # program the count is that of the other mappings, so that checkpoints fit them all.
        mesh, count = _mesh_of_cells(), _length(arrays)
        repeated = np.minimum(np.arange(-(-count // mesh.size) * mesh.size), count - 1)
        arrays = jax.tree.map(lambda leaf: leaf[repeated], arrays)
        everywhere, split = PartitionSpec(), PartitionSpec(_CELLS)
        specs: Any = {'in_specs': (everywhere, everywhere, split), 'out_specs': split}
        # Without the check of what is the same on all devices: nothing is.
        if hasattr(jax, 'shard_map'):
            spread = jax.shard_map(train, mesh=mesh, check_vma=False, **specs)
        else:
            from jax.experimental.shard_map import shard_map  # where JAX is older than 0.6.1

            spread = shard_map(train, mesh=mesh, check_rep=False, **specs)
        return jax.tree.map(lambda leaf: leaf[:count], spread(data, shared, arrays))

    return mapped


def place_data(mapping: CellMapping, data: Any) -> Any:
    """Copies data to every device where cells are spread over devices."""
    if mapping != 'devices':
        return data
    replicated = NamedSharding(_mesh_of_cells(), PartitionSpec())
    return jax.device_put(data, replicated)


def add_cell_axis(cell: Any) -> Any:
    """A pytree of one cell as one of many."""
    return jax.tree.map(lambda leaf: leaf[None], cell)


def drop_cell_axis(cells: Any) -> Any:
    """The first cell of a pytree of many."""
    return jax.tree.map(lambda leaf: leaf[0], cells)


def _mesh_of_cells() -> Mesh:
    return Mesh(np.array(jax.local_devices()), (_CELLS,))


class SharedPrograms:
    """What all algorithms share, compiled once for them; arrays have a leading axis of cells."""

    def __init__(self, workload: Workload, recipe: Recipe, data: Any, mapping: CellMapping):
        self.workload = workload
        self.recipe = recipe
        self.data = place_data(mapping, data)
        self.map_cells = functools.partial(map_over_cells, mapping)
        dense = Training(workload, recipe, DENSE)

        def init(data, seeds):
            return self.map_cells(dense.init, data)(seeds)

        def evaluate(data, params, state):
            return self.map_cells(dense.evaluate, data)(params, state)

        self._init = jax.jit(init)
        self._evaluate = jax.jit(evaluate)

    def init(self, seeds: jax.Array) -> tuple[Any, Any]:
        """Parameters and state before pruning, of seeds int32[cells]."""
        return self._init(self.data, seeds)

    def evaluate(self, params: Any, state: Any) -> Metrics:
        """Metrics by name, float[cells]."""
        return self._evaluate(self.data, params, state)


class Report(NamedTuple):
    """What cells have come to."""

    metrics: dict[str, np.ndarray]  # by name, float[cells]
    masks: Masks


class CompiledTraining:
    """The compiled functions of one algorithm; arrays have a leading axis of cells.

    `FeedTraining` has the same methods for tasks whose batches come from the host.
    """

    def __init__(self, programs: SharedPrograms, algorithm: str):
        self._programs = programs
        map_cells = programs.map_cells
        self._training = training = Training(programs.workload, programs.recipe, algorithm)

        def advance(data, targets, carries, first, stop):
            return map_cells(training.advance, data)(targets, carries, first=first, stop=stop)

        self._start = jax.jit(map_cells(training.start))
        self._forward = jax.jit(map_cells(training.forward))
        self._advance = jax.jit(advance, donate_argnums=2)

    def targets(self, sparsities: Sequence[float]) -> Any:
        """The target of each leaf for each cell: float32[cells], `None` where dense."""
        data = self._programs.data
        trees = [self._training.targets(data, sparsity) for sparsity in sparsities]
        return jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.float32), *trees)

    def start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        """The carries before the first step."""
        numbers = jnp.asarray(seeds, jnp.int32)
        params, state = self._programs.init(numbers)
        return self._start(targets, numbers, params, state)

    def advance(self, targets: Any, carries: Carry, first: int, stop: int) -> Carry:
        """Trains all cells from step `first` up to `stop`; the carries given are used up."""
        data = self._programs.data
        # Arrays, not constants: one program serves chunks of any length.
        bounds = jnp.int32(first), jnp.int32(stop)
        return self._advance(data, targets, carries, *bounds)

    def report(self, targets: Any, carries: Carry) -> Report:
        """What the cells have come to."""
        params = self._forward(targets, carries)
        metrics = dict(self._programs.evaluate(params, carries.state))
        return Report(jax.tree.map(np.array, metrics), self.masks(carries))

    def masks(self, carries: Carry) -> Masks:
        """Masks by leaf path, uint8[cells, …leaf shape]; leaves that stay dense have none."""
        return masks_by_path(carries.opt_state)

    def open(self, seeds: Sequence[int]) -> None:
        """Does nothing: batches are drawn inside the program."""

    def close(self) -> None:
        """Does nothing."""

    def prunable(self) -> dict[str, int]:
        """The number of weights of each leaf that may be pruned, by path."""
        return self._training.prunable(self._programs.data)


def masks_by_path(opt_state: Any) -> Masks:
    """Copies of the masks in an optimizer's state, by the path of their leaf."""
    masks = {}
    for state in sparse_states(opt_state):
        paths, leaves, _ = tree_lib.flatten_with_paths(state.masks)
        for path, leaf in zip(paths, leaves, strict=True):
            # A copy: an array of the host may share the memory of carries, which are donated.
            masks[tree_lib.path_string(path)] = np.array(leaf)
    return masks


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
            mesh = _mesh_for(_length(batch))
            _warn_of_idle_devices(_length(batch), mesh.size)
            batch = _spread(batch, mesh)
            target, carry = _replicate((target, carry), mesh)
            carry, done = self._step(target, carry, np.int32(number), batch)
            running.append(done)
            if len(running) > _AHEAD:
                running.popleft().block_until_ready()
        return _ADD_AXIS(carry)

    def report(self, targets: Any, carries: Carry) -> Report:
        target, carry = _DROP_AXIS((targets, carries))
        if self._task.evaluate_host is not None:
            values = self._bound_values(target, carry)
            metrics = dict(self._task.evaluate_host(values, self._seed))
        elif self._task.tests is None:
            metrics = dict(self._evaluate(self._forward(targets, carries), carry.state))
        else:
            metrics = self._mean_metrics(self._forward(targets, carries), carry.state)
        metrics = jax.tree.map(np.array, metrics)
        return Report(add_cell_axis(metrics), self.masks(carries))

    def _mean_metrics(self, params: Any, state: Any) -> dict[str, Any]:
        """Means of the metrics over the test batches; a shorter batch is padded to the first's size."""
        assert self._task.tests is not None
        totals: dict[str, float] = {}
        size = examples = 0

        def padded(leaf):
            return np.pad(leaf, [(0, size - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        for batch in self._task.tests():
            count = _length(batch)
            size = size or count
            examples += count
            mesh = _mesh_for(size)
            params, state = _replicate((params, state), mesh)
            metrics = self._evaluate(params, state, _spread(jax.tree.map(padded, batch), mesh))
            for name, values in metrics.items():
                unpadded = np.asarray(values, np.float64)[:count]
                totals[name] = totals.get(name, 0.0) + float(unpadded.sum())
        return {name: np.float32(total / examples) for name, total in totals.items()}

    def masks(self, carries: Carry) -> Masks:
        return masks_by_path(carries.opt_state)

    def prunable(self) -> dict[str, int]:
        return self._training.prunable(self._data)

    def _bound_values(self, target: Any, carry: Carry) -> Values:
        return lambda observations: np.asarray(self._values(target, carry, observations))


def _length(batch: Any) -> int:
    return len(jax.tree.leaves(batch)[0])


def _mesh_for(examples: int) -> Mesh:
    """As many devices as can have the same number of examples each."""
    devices = math.gcd(examples, jax.local_device_count())
    return Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))


@functools.cache
def _warn_of_idle_devices(examples: int, used: int) -> None:
    """Warns once."""
    devices = jax.local_device_count()
    if used < devices:
        warnings.warn(
            f'{used} of {devices} devices are used: batches of {examples} examples cannot be spread over all; choose '
            f'batches whose size {devices} divides',
            stacklevel=4,
        )


def _spread(batch: Any, mesh: Mesh) -> Any:
    """The batch with as many examples on each device."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))


def _replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree with a copy on each device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
