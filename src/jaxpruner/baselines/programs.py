"""The training of many cells with one algorithm as compiled programs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.baselines import over as over_lib
from jaxpruner.baselines.over import Over
from jaxpruner.baselines.pruners import DENSE
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Workload
from jaxpruner.baselines.training import Training
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.sparse_state import sparse_states


class Common:
    """What all algorithms share, compiled once for all of them; every array has a leading axis of cells.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> common = Common(workload, recipe, workload.data(recipe, None), 'map')
    >>> common.evaluate(*common.init(jnp.arange(3)))['accuracy'].shape
    (3,)
    """

    def __init__(self, workload: Workload, recipe: Recipe, data: Any, over: Over):
        """Compiles nothing yet.

        Args:
          workload: what is trained.
          recipe: its numbers.
          data: of the workload.
          over: how cells are trained together, as `over.spread` takes it.
        """
        self.workload, self.recipe, self.data = workload, recipe, over_lib.shared(over, data)
        self.spread = functools.partial(over_lib.spread, over)
        dense = Training(workload, recipe, DENSE)
        init = jax.jit(lambda data, seeds: self.spread(dense.init, data)(seeds))
        evaluate = jax.jit(
            lambda data, params, state: self.spread(dense.evaluate, data)(params, state)
        )
        self.init: Callable[[jax.Array], Any] = functools.partial(
            init, self.data
        )  # int32[cells] -> parameters, state
        self.evaluate: Callable[..., Any] = functools.partial(
            evaluate, self.data
        )  # parameters, state -> metrics


class Programs:
    """The compiled functions of one algorithm; every array has a leading axis of cells.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> programs = Programs(Common(workload, recipe, workload.data(recipe, None), 'map'), 'random')
    >>> targets = programs.targets([0.5, 0.8])
    >>> programs.advance(targets, programs.start(targets, [0, 0]), 0, 2).key.shape
    (2,)
    """

    def __init__(self, common: Common, algorithm: str):
        """Compiles nothing yet.

        Args:
          common: what the algorithms share.
          algorithm: its name.
        """
        self._common, spread = common, common.spread
        self._training = training = Training(common.workload, common.recipe, algorithm)
        self._start = jax.jit(lambda *arrays: spread(training.start)(*arrays))
        self._advance = jax.jit(
            lambda data, targets, carries, first, stop: spread(training.advance, data)(
                targets, carries, first=first, stop=stop
            ),
            donate_argnums=2,
        )
        self._forward = jax.jit(lambda targets, carries: spread(training.forward)(targets, carries))

    def targets(self, sparsities: Sequence[float]) -> Any:
        """The target of each leaf for each cell.

        Args:
          sparsities: one for each cell.

        Returns:
          A tree like the parameters of float32[cells], `None` where dense.
        """
        trees = [self._training.targets(self._common.data, sparsity) for sparsity in sparsities]
        return jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.float32), *trees)

    def start(self, targets: Any, seeds: Sequence[int]) -> Carry:
        """The carries before the first step.

        Args:
          targets: from `targets`.
          seeds: one for each cell.
        """
        numbers = jnp.asarray(seeds, jnp.int32)
        return self._start(targets, numbers, *self._common.init(numbers))

    def advance(self, targets: Any, carries: Carry, first: int, stop: int) -> Carry:
        """Trains all cells from a step up to another; the carries given are used up.

        Args:
          targets: from `targets`.
          carries: before step `first`.
          first: the first step.
          stop: past the last.
        """
        return self._advance(self._common.data, targets, carries, jnp.int32(first), jnp.int32(stop))

    def report(
        self, targets: Any, carries: Carry
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What is known of the cells now.

        Args:
          targets: from `targets`.
          carries: of any step.

        Returns:
          Metrics by name, float[cells]; and masks by leaf path, uint8[cells, …leaf shape]; leaves that stay dense have
          none.
        """
        metrics = self._common.evaluate(self._forward(targets, carries), carries.state)
        return jax.tree.map(np.array, dict(metrics)), self.masks(carries)

    def masks(self, carries: Carry) -> dict[str, np.ndarray]:
        """The masks by leaf path, uint8[cells, …leaf shape]; leaves that stay dense have none.

        Args:
          carries: of any step.
        """
        return masks_by_path(carries.opt_state)

    def open(self, seeds: Sequence[int]) -> None:
        """Does nothing: batches are drawn inside the program. `fed.Fed` makes its feed here.

        Args:
          seeds: one for each cell.
        """

    def close(self) -> None:
        """Does nothing."""

    def prunable(self) -> dict[str, int]:
        """The leaves that may be pruned: their number of weights by path."""
        return self._training.prunable(self._common.data)


def masks_by_path(opt_state: Any) -> dict[str, np.ndarray]:
    """Copies of the masks in an optimizer's state.

    Args:
      opt_state: of a wrapped optimizer.

    Returns:
      uint8 arrays by the path of their leaf; leaves that stay dense have none.

    >>> masks_by_path(())
    {}
    """
    masks = {}
    for state in sparse_states(opt_state):
        paths, leaves, _ = tree_lib.flatten_with_paths(state.masks)
        masks |= dict(zip(map(tree_lib.path_string, paths), leaves, strict=True))
    # Copies: what device_get returns may share the memory of carries, which the next chunk takes over.
    return jax.tree.map(np.array, masks)
