"""What models on compact weights have in common, whether they store blocks or single weights."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpruner import control
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training import elementwise_optimizers
from jaxpruner.sparse.training.conversion import Stored
from jaxpruner.sparse.training.growing import GROW_SCORES, STATIC, GrowthInputs
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.sparse.training.moving import MoveSettings
from jaxpruner.sparse.training.plans import BlockPlan
from jaxpruner.sparse.training.unstructured_positions import KeptWeights

Topology = Mapping[str, Any]  # by name of the leaf: whole numbers that say where its weights are
# The arrays of one leaf in a topology, by name; 'positions' is always among them.
LeafTopology = Mapping[str, Any]
Gradients = Mapping[str, jax.Array]  # by name of the leaf


class TrainingState(NamedTuple):
    """The arrays that training carries from step to step."""

    weights: Any
    topology: Topology
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class CompactModel(abc.ABC):
    """A model in which some leaves are stored compactly. It holds no arrays; weights and topology go through it.

    Attributes:
      products: the matrices of the model.
      plan: what becomes of each leaf; it prints as a table.
      moves: when weights are dropped and grown, how many, and by which scores.
    """

    products: Products
    plan: BlockPlan
    moves: MoveSettings

    # The array of a stored leaf whose weights are chosen, and how messages call the gradient that RigL needs.
    chosen_array: ClassVar[str]
    gradients_argument: ClassVar[str]

    @property
    @abc.abstractmethod
    def stored_leaves(self) -> Mapping[str, Layout | KeptWeights]:
        """How leaves are stored, by name."""

    @abc.abstractmethod
    def _operator(
        self, name: str, stored: Stored, leaf_topology: LeafTopology, probe: jax.Array | None
    ) -> Any:
        """The operator that multiplies in the place of a leaf."""

    @abc.abstractmethod
    def _restored(self, name: str, stored: Stored, leaf_topology: LeafTopology) -> jax.Array:
        """The dense leaf."""

    @abc.abstractmethod
    def _mask(self, name: str, leaf_topology: LeafTopology) -> jax.Array:
        """The mask of a leaf, uint8 in its shape."""

    @abc.abstractmethod
    def _moved(self, state: TrainingState, scores: Gradients, tx: Any, step: Any) -> TrainingState:
        """The state after the smallest weights were dropped and those with the largest scores grown."""

    def apply(
        self, weights: Any, topology: Topology, *inputs: Any, probe: Gradients | None = None
    ) -> Any:
        """Runs the model.

        Args:
          weights: as `pack` returns them.
          topology: where they are kept.
          *inputs: of the model; other shapes than those of the sample are traced anew.
          probe: `model.probe()`, to get RigL's scores; `probe` says what the backward pass returns for it.

        Returns:
          What the model returns for `unpack(weights, topology)`.
        """
        operators = {}
        for name, stored in self._stored(weights).items():
            probe_of_leaf = None if probe is None else probe[name]
            leaf_topology = self._topology_arrays(topology[name])
            operators[name] = self._operator(name, stored, leaf_topology, probe_of_leaf)
        with_operators = self.products.put(weights, operators)
        return self.products.apply(with_operators, *inputs)

    def probe(self) -> dict[str, jax.Array]:
        """Zeros, float32 by name of the leaf, for all blocks or weights that could be kept: RigL grows by them.

        The probe changes no result, so its derivative is zero. The backward pass returns something else in place of
        that:

        - for single weights, the gradient with respect to the dense leaf;
        - for blocks, the norm of each block of that gradient. If a leaf is multiplied at several places, in several
          trips of a loop, or under a `jax.vmap` around `apply`, these norms are added. Their sum is at least the norm
          of the gradient, and larger where gradients cancel.

        >>> # gradients = jax.grad(loss, argnums=2)(weights, topology, model.probe(), batch)
        """
        probe = {}
        for name, leaf in self.stored_leaves.items():
            probe[name] = jnp.zeros(leaf.candidates_shape)
        return probe

    def unpack(self, weights: Any, topology: Topology) -> Any:
        """The dense parameters, in the tree and dtypes that `pack` was given; zeros where nothing is kept.

        With a term of low rank the product of its two matrices is added, so no weight stays zero; `masks` says where
        the blocks are.
        """
        leaves = {}
        for name, stored in self._stored(weights).items():
            leaf_topology = self._topology_arrays(topology[name])
            leaves[name] = self._restored(name, stored, leaf_topology)
        return self.products.put(weights, leaves)

    def masks(self, topology: Topology) -> Any:
        """The masks: a tree like the parameters, uint8, with `None` for leaves that stay dense."""
        masks = {}
        for name in self.stored_leaves:
            leaf_topology = self._topology_arrays(topology[name])
            masks[name] = self._mask(name, leaf_topology)
        return self._tree_with_none(masks)

    def wrap_optax(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer, which checks at `init` that it takes the step of the masked dense model.

        Raises:
          ValueError: at `init`, for optimizers that depend on shapes, such as muon and adafactor; also for those whose
            moments cannot follow when weights are replaced.
        """
        optimizer = optax.with_extra_args_support(tx)

        def init(params: Any) -> Any:
            # optax finds moments by an init with a placeholder, which has no leaves.
            if jax.tree.leaves(params):
                self._check_optimizer(optimizer, params)
            return optimizer.init(params)

        return optax.GradientTransformationExtraArgs(init, optimizer.update)

    def _update(
        self,
        state: TrainingState,
        tx: optax.GradientTransformation,
        step: Any,
        gradients: Gradients | Callable[[Any, Topology], Gradients] | None,
        due: Any,
    ) -> tuple[Any, Topology, Any]:
        """Drops and grows weights, if that is due."""
        self._check_optimizer(tx, state.weights)
        if self.moves.algorithm == STATIC:
            return state.weights, state.topology, state.opt_state
        if due is None:
            due = self.moves.scheduler.is_mask_update_iter(step)

        def move(state: TrainingState, step: Any) -> TrainingState:
            scores = self._grow_scores(state.weights, state.topology, gradients, step)
            return self._moved(state, scores, tx, step)

        state = state._replace(topology=dict(state.topology))
        # Users carry a plain tuple through their loops.
        weights, topology, opt_state = control.run_once(due, move, state, step)
        return weights, topology, opt_state

    def _grow_scores(
        self, weights: Any, topology: Topology, gradients: Any, step: Any
    ) -> Mapping[str, jax.Array]:
        """A score for each block or weight that could be stored: those with the largest are grown."""

        def given_gradients() -> Any:
            return gradients(weights, topology) if callable(gradients) else gradients

        shapes = {}
        for name, leaf in self.stored_leaves.items():
            shapes[name] = leaf.candidates_shape
        inputs = GrowthInputs(
            shapes=shapes,
            rng_seed=self.moves.rng_seed,
            step=step,
            gradients=given_gradients,
            argument=self.gradients_argument,
        )
        return GROW_SCORES[self.moves.algorithm](inputs)

    @staticmethod
    @abc.abstractmethod
    def _topology_arrays(entry: Any) -> LeafTopology:
        """The arrays of a leaf, from its entry in the topology."""

    def _check_optimizer(self, tx: optax.GradientTransformation, weights: Any) -> None:
        """Refuses an optimizer that would not take the step of the masked dense model; computes nothing."""
        compact = jax.tree.map(_shape, weights)
        whole_leaves = {}
        for name, stored in self._stored(compact).items():
            matrix_leaf = self.products.by_leaf[name]
            shape = jax.ShapeDtypeStruct(matrix_leaf.shape, matrix_leaf.dtype)
            whole_leaves[name] = {**stored, self.chosen_array: shape}
        whole = self.products.put(compact, whole_leaves)
        optimizer = optax.with_extra_args_support(tx)
        elementwise_optimizers.check_elementwise(optimizer, whole, compact)
        if self.moves.ever_moves:
            sparse_state_lib.check_restartable(tx, compact)

    def _stored(self, weights: Any) -> dict[str, Any]:
        """The stored arrays of leaves that are stored compactly, by name."""
        by_name = self.products.by_name(weights)
        return {name: by_name[name] for name in self.stored_leaves}

    def _tree_with_none(self, entries: Mapping[str, Any]) -> Any:
        """A tree like the parameters, with these entries, and `None` for the other leaves."""
        by_name: dict[str, Any] = dict.fromkeys(self.plan.leaves)
        by_name.update(entries)
        return self.products.unflatten(by_name)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def check_select(select: Any, ways: Sequence[str]) -> None:
    """Refuses an unknown way to select what is stored at first."""
    if select not in ways:
        near = tree_lib.nearest(str(select), ways)
        raise ValueError(f'select={select!r} is unknown; {near}')
