"""The training of many cells with one algorithm, as compiled programs."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.cell_logs import Masks
from jaxpruner.baselines.cell_mapping import CellMapping, map_over_cells, place_data
from jaxpruner.baselines.metrics import Metrics
from jaxpruner.baselines.pruners import DENSE
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Workload
from jaxpruner.baselines.training import Training
from jaxpruner.sparse_state import sparse_states


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

        def start(*arrays):
            return map_cells(training.start)(*arrays)

        def advance(data, targets, carries, first, stop):
            return map_cells(training.advance, data)(targets, carries, first=first, stop=stop)

        def forward(targets, carries):
            return map_cells(training.forward)(targets, carries)

        self._start = jax.jit(start)
        self._forward = jax.jit(forward)
        self._advance = jax.jit(advance, donate_argnums=2)

    def targets(self, sparsities: Sequence[float]) -> Any:
        """The target of each leaf for each cell: float32[cells], `None` where dense."""
        data = self._programs.data
        trees = [self._training.targets(data, sparsity) for sparsity in sparsities]

        def join(*leaves):
            return jnp.asarray(leaves, jnp.float32)

        return jax.tree.map(join, *trees)

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
        on_host = jax.tree.map(np.array, metrics)
        return Report(on_host, self.masks(carries))

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
