"""A model in which single weights of matrices are kept and trained: values, and whole numbers that say where."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from jaxpruner.sparse.operators.csr import CsrMatrix
from jaxpruner.sparse.training import kept_positions, unstructured_positions
from jaxpruner.sparse.training.compact_models import (
    CompactModel,
    Gradients,
    LeafTopology,
    Topology,
    TrainingState,
    check_select,
)
from jaxpruner.sparse.training.conversion import Stored
from jaxpruner.sparse.training.unstructured_positions import KeptWeights


@dataclasses.dataclass(frozen=True)
class UnstructuredSparse(CompactModel):
    """A model in CSR, as `unstructured_sparse` makes it. It holds no arrays; weights and topology go through it.

    Weights are the tree of the parameters. In the place of a leaf of which single weights are kept stands a dictionary:
    `'compressed'`, `[*layers, kept]`, row by row. The topology has int32 arrays for each of these leaves, by name:
    `'positions'` in the flattened matrix, `'row_offsets'`, and what the transposed matrix needs, `'transposed_order'`
    and `'transposed_row_offsets'`. That is 8 bytes a kept weight.

    Attributes:
      products: the matrices of the model.
      plan: what becomes of each leaf; it prints as a table.
      moves: when weights are dropped and grown, how many, and by which scores.
      leaves: how many weights are kept, by name.

    >>> UnstructuredSparse.__dataclass_params__.frozen
    True
    """

    leaves: Mapping[str, KeptWeights]

    chosen_array: ClassVar[str] = 'compressed'
    gradients_argument: ClassVar[str] = 'dense_grads'

    @property
    def stored_leaves(self) -> Mapping[str, KeptWeights]:
        """How many weights of each leaf are kept, by name."""
        return self.leaves

    def pack(
        self,
        params: Any,
        topology: Topology | None = None,
        *,
        select: Literal['random', 'magnitude'] = 'random',
    ) -> tuple[Any, Topology]:
        """Takes the kept weights out of parameters.

        Args:
          params: the dense parameters.
          topology: where weights are kept, as from an earlier call.
          select: which weights are kept if there is no topology: `'random'` ones, or for a trained model the largest
            (`'magnitude'`).

        Returns:
          Weights and topology.

        Raises:
          ValueError: an unknown way to select.
        """
        check_select(select, ('random', 'magnitude'))
        stored, packed = {}, {}
        parameters = self.products.leaves(params)
        for number, (name, leaf) in enumerate(self.leaves.items()):
            matrix_leaf = self.products.by_leaf[name]
            matrices = matrix_leaf.to_matrix(parameters[name])
            if topology is not None:
                positions = topology[name]['positions']
            elif select == 'magnitude':
                positions = unstructured_positions.largest(leaf, matrices)
            else:
                rng = self.moves.host_rng(number)
                positions = unstructured_positions.draw(leaf, rng)
            # The other arrays follow from the positions.
            arrays = leaf.arrays_of(jnp.asarray(positions))
            compressed = unstructured_positions.gather(leaf, matrices, arrays['positions'])
            packed[name] = arrays
            stored[name] = {'compressed': compressed}
        return self.products.put(params, stored), packed

    def update(
        self,
        weights: Any,
        topology: Topology,
        opt_state: Any,
        *,
        tx: optax.GradientTransformation,
        step: Any,
        dense_grads: Gradients | Callable[[Any, Topology], Gradients] | None = None,
        due: Any = None,
    ) -> tuple[Any, Topology, Any]:
        """Drops the smallest weights and grows as many others, if the schedule says so.

        A weight that is grown starts at zero, with moments of zero. This may be called in every step, inside `jax.jit`.

        Args:
          weights: as they are after the optimizer's step.
          topology: where they are kept.
          opt_state: of `tx`.
          tx: the optimizer.
          step: its number, an int32 scalar or a Python int.
          dense_grads: for RigL, what the backward pass returns for `probe()`, by name: gradients of the dense leaves.
            Or a function of weights and topology that computes it, which runs only if it is needed.
          due: whether to drop and grow now, whatever the schedule says.

        Returns:
          Weights, topology and state of the optimizer.

        Raises:
          ValueError: RigL without gradients.
        """
        state = TrainingState(weights, topology, opt_state)
        return self._update(state, tx, step, dense_grads, due)

    def _operator(
        self, name: str, stored: Stored, leaf_topology: LeafTopology, probe: jax.Array | None
    ) -> CsrMatrix:
        pattern = unstructured_positions.pattern_of(leaf_topology)
        return CsrMatrix(stored['compressed'], pattern, probe)

    def _restored(self, name: str, stored: Stored, leaf_topology: LeafTopology) -> jax.Array:
        return self._dense(name, stored['compressed'], leaf_topology['positions'])

    def _mask(self, name: str, leaf_topology: LeafTopology) -> jax.Array:
        positions = leaf_topology['positions']
        ones = jnp.ones(positions.shape, jnp.uint8)
        return self._dense(name, ones, positions)

    def _dense(self, name: str, compressed: jax.Array, positions: jax.Array) -> jax.Array:
        """The leaf with these weights, and zeros elsewhere."""
        leaf = self.leaves[name]
        matrices = unstructured_positions.scatter(leaf, compressed, positions)
        return self.products.by_leaf[name].from_matrix(matrices)

    def _moved(self, state: TrainingState, scores: Gradients, tx: Any, step: Any) -> TrainingState:
        fraction = self.moves.drop_fraction(step)
        new_topology, moved, places_by_name = {}, {}, {}
        for name, stored in self._stored(state.weights).items():
            leaf = self.leaves[name]
            compressed = stored['compressed']
            positions = state.topology[name]['positions']
            new_positions, places = unstructured_positions.replace(
                leaf, compressed, positions, scores[name], fraction
            )
            new_topology[name] = leaf.arrays_of(new_positions)
            moved[name] = {'compressed': kept_positions.moved(compressed, places)}
            places_by_name[name] = {'compressed': places}
        # The moments of dense leaves do not move, so their places are not read.
        unread = jnp.zeros((), jnp.int32)
        no_places = jax.tree.map(lambda _: unread, self.products.params)
        all_places = self.products.put(no_places, places_by_name)
        opt_state = kept_positions.move_moments(tx, state.opt_state, all_places)
        weights = self.products.put(state.weights, moved)
        return TrainingState(weights, new_topology, opt_state)

    @staticmethod
    def _topology_arrays(entry: Any) -> LeafTopology:
        return entry
