"""The compiled programs of a training: of many cells at once, or of one whose batches come from the host."""

import math
from collections.abc import Sequence
from typing import Any

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


class Programs:
    """The compiled functions of a sweep; arrays have a leading axis of cells.

    Cells of an algorithm train together: one after another on a CPU, where nothing else is faster, and under `vmap`
    elsewhere. A task with a feed trains one cell, whose batches are spread over all devices.
    """

    def __init__(self, workload: Workload, recipe: Recipe, data: Any):
        self.task, self._recipe = workload.task(recipe, data), recipe
        has_feed = self.task.feed is not None
        # Data are an argument of the programs, which would contain them otherwise; readers of a feed are no arrays.
        self._arrays = None if has_feed else data

        def run(method, algorithm, arrays, carries, others, *shared):
            """Runs a method of `Training` for each cell."""
            task = workload.task(recipe, data if has_feed else arrays)
            function = getattr(Training(task, recipe, algorithm), method)

            def of_cell(cell):
                return function(*cell, *shared)

            cells = carries, *others
            if len(jax.tree.leaves(carries)[0]) == 1:  # a single cell needs no loop around it
                only = of_cell(jax.tree.map(lambda leaf: leaf[0], cells))
                return jax.tree.map(lambda leaf: leaf[None], only)
            if jax.default_backend() == 'cpu':
                return jax.lax.map(of_cell, cells)
            return jax.vmap(of_cell)(cells)

        self._run = jax.jit(run, static_argnums=(0, 1))
        self._train = jax.jit(run, static_argnums=(0, 1), donate_argnums=3)

    def targets(self, algorithm: str, sparsities: Sequence[float]) -> Any:
        """The target of each leaf for each cell: float32[cells], `None` where dense."""
        training = Training(self.task, self._recipe, algorithm)
        trees = [training.targets(sparsity) for sparsity in sparsities]
        return jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.float32), *trees)

    def start(self, algorithm: str, targets: Any, seeds: Sequence[int]) -> Carry:
        """The carries before the first step."""
        numbers = jnp.asarray(seeds, jnp.int32)
        begun = self._run('init', DENSE, self._arrays, numbers, ())
        return self._run('start', algorithm, self._arrays, begun, (targets, numbers))

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
            return self._train('advance', algorithm, self._arrays, carries, (targets,), *bounds)
        for number in range(first, stop):
            batch = feed.next(self._bound_values(algorithm, targets, carries))
            (targets, carries), batch = _spread((targets, carries), batch)
            jax.block_until_ready(carries)  # the host is one batch ahead, no more
            step = np.int32(number), batch
            carries = self._train('step', algorithm, None, carries, (targets,), *step)
        return carries

    def report(
        self, algorithm: str, targets: Any, carries: Carry, seeds: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """What the cells have come to: metrics by name, float[cells]."""
        if self.task.evaluate_host is None:
            metrics = self._run('evaluate', algorithm, self._arrays, carries, (targets,))
            return jax.tree.map(np.array, dict(metrics))
        values = self._bound_values(algorithm, targets, carries)
        metrics = self.task.evaluate_host(values, *seeds)
        return {name: np.array([value]) for name, value in metrics.items()}

    def prunable(self) -> dict[str, int]:
        """The number of weights of each leaf that may be pruned, by path."""
        return Training(self.task, self._recipe, DENSE).prunable()

    def _bound_values(self, algorithm: str, targets: Any, carries: Carry) -> Values:
        def values(inputs):
            cells, spread = _spread((carries, targets), inputs)
            of_cells = self._run('values', algorithm, None, cells[0], cells[1:], spread)
            return jax.tree.map(lambda leaf: np.asarray(leaf[0]), of_cells)

        return values


def masks_by_path(opt_state: Any) -> Masks:
    """Copies of the masks in an optimizer's state, by the path of their leaf; dense leaves have none."""
    masks = {}
    for state in sparse_states(opt_state):
        for path, leaf in tree_lib.zip_with_paths(state.masks):
            # A copy: an array of the host may share the memory of carries, which are donated.
            masks[tree_lib.path_string(path)] = np.array(leaf)
    return masks


def _spread(tree: Any, batch: Any) -> tuple[Any, Any]:
    """A copy of the tree for each device, and as many examples of the batch, on as many devices as divide it."""
    devices = math.gcd(len(jax.tree.leaves(batch)[0]), jax.local_device_count())
    mesh = Mesh(np.array(jax.local_devices()[:devices]), ('examples',))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.device_put(
        (tree, batch), (everywhere, NamedSharding(mesh, PartitionSpec('examples')))
    )
