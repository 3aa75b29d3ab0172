"""A model whose matrices are trained in blocks: values that an optimizer trains, and whole numbers that say where."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import seeds
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.training import block_positions, conversion
from jaxpruner.sparse.training.compact_models import (
    CompactModel,
    Gradients,
    LeafTopology,
    Topology,
    TrainingState,
    check_select,
)
from jaxpruner.sparse.training.conversion import BlockLeaf, Stored
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.sparse.training.moving import MoveSettings


@dataclasses.dataclass(frozen=True)
class BlockSparse(CompactModel):
    """A model in blocks, as `block_sparse` makes it. It holds no arrays; weights and topology go through it.

    Weights are the tree of the parameters. In the place of a leaf that is trained in blocks stands a dictionary:
    `'values'`, `[*layers, groups, blocks, in, out]`, and with a term of low rank `'down'`, `[*layers, inputs, rank]`,
    and `'up'`, `[*layers, rank, outputs]`. The topology has the positions of the blocks by name of the leaf,
    int32 `[*layers, groups, blocks]`.

    Attributes:
      products: the matrices of the model.
      plan: what becomes of each leaf; it prints as a table.
      moves: when blocks are dropped and grown, how many, and by which scores.
      layouts: the blocks of each leaf that is trained in blocks, by name.

    >>> import jaxpruner
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> model = jaxpruner.sparse.block_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.75, block=(4, 8))
    >>> weights, topology = model.pack(params)
    >>> jax.tree.map(jnp.shape, (weights, topology))
    ({'bias': (32,), 'kernel': {'values': (4, 1, 4, 8)}}, {'kernel': (4, 1)})
    """

    layouts: Mapping[str, Layout]

    chosen_array: ClassVar[str] = 'values'
    gradients_argument: ClassVar[str] = 'block_norms'

    @property
    def stored_leaves(self) -> Mapping[str, Layout]:
        """The blocks of each leaf that is trained in blocks, by name."""
        return self.layouts

    def pack(
        self,
        params: Any,
        topology: Topology | None = None,
        *,
        select: Literal['balanced', 'magnitude'] = 'balanced',
    ) -> tuple[Any, Topology]:
        """Takes the blocks out of parameters.

        Args:
          params: the dense parameters.
          topology: where blocks are, as from an earlier call.
          select: which blocks are stored if there is no topology. `'balanced'` draws them such that all inputs lead to
            about the same number of groups. `'magnitude'` takes the blocks of each group with the largest norms, for a
            trained model.

        Returns:
          Weights and topology. The term of low rank starts at zero: `'down'` is random, and `'up'` zero.

        Raises:
          ValueError: an unknown way to select.
        """
        check_select(select, ('balanced', 'magnitude'))
        if topology is None and select == 'balanced':
            topology = balanced_positions(self.layouts, self.moves)
        pack = self._pack
        if not tree_lib.has_traced((params, topology)):
            pack = jax.jit(pack)
        return pack(params, topology)

    def update(
        self,
        weights: Any,
        topology: Topology,
        opt_state: Any,
        *,
        tx: optax.GradientTransformation,
        step: Any,
        block_norms: Gradients | Callable[[Any, Topology], Gradients] | None = None,
        due: Any = None,
    ) -> tuple[Any, Topology, Any]:
        """Drops the smallest blocks and grows as many others, if the schedule says so.

        In each matrix, `round(fraction * blocks)` blocks are dropped: those with the smallest mean square. The largest
        block of each group is kept, unless the fraction is 1. Each group grows as many blocks as it dropped. A block
        that is grown starts at zero, with moments of zero. This may be called in every step, inside `jax.jit`.

        Args:
          weights: as they are after the optimizer's step.
          topology: where their blocks are.
          opt_state: of `tx`.
          tx: the optimizer.
          step: its number, an int32 scalar or a Python int.
          block_norms: for RigL, what the backward pass returns for `probe()`, by name: the norms of the gradient's
            blocks. Or a function of weights and topology that computes it, which runs only if it is needed.
          due: whether to drop and grow now, whatever the schedule says.

        Returns:
          Weights, topology and state of the optimizer.

        Raises:
          ValueError: RigL without norms, or an optimizer that `wrap_optax` refuses.
        """
        state = TrainingState(weights, topology, opt_state)
        return self._update(state, tx, step, block_norms, due)

    def _operator(
        self, name: str, stored: Stored, leaf_topology: LeafTopology, probe: jax.Array | None
    ) -> BlockMatrix:
        layout = self.layouts[name]
        return BlockMatrix(
            **stored,
            indices=leaf_topology['positions'],
            outputs=layout.outputs,
            probe=probe,
        )

    def _restored(self, name: str, stored: Stored, leaf_topology: LeafTopology) -> jax.Array:
        block_leaf = self._block_leaf(name)
        return block_leaf.restore(stored, leaf_topology['positions'])

    def _mask(self, name: str, leaf_topology: LeafTopology) -> jax.Array:
        block_leaf = self._block_leaf(name)
        return block_leaf.mask(leaf_topology['positions'])

    def _moved(self, state: TrainingState, scores: Gradients, tx: Any, step: Any) -> TrainingState:
        fraction = self.moves.drop_fraction(step)
        new_topology, flags, moved = {}, {}, {}
        for name, stored in self._stored(state.weights).items():
            values = stored['values']
            positions = state.topology[name]
            magnitudes = conversion.mean_magnitudes(values, positions, self.layouts[name])
            replacement = block_positions.replace(positions, magnitudes, scores[name], fraction)
            new_topology[name] = replacement.positions
            is_new_block = replacement.is_new[..., None, None]
            is_new = jnp.broadcast_to(is_new_block, values.shape)
            moved[name] = {**stored, 'values': jnp.where(is_new, 0, values)}
            # The term of low rank keeps its moments.
            flags[name] = {**dict.fromkeys(stored), 'values': is_new}
        flags = self._tree_with_none(flags)
        opt_state = sparse_state_lib.restart_inner_state(state.opt_state, flags)
        weights = self.products.put(state.weights, moved)
        return TrainingState(weights, new_topology, opt_state)

    @staticmethod
    def _topology_arrays(entry: Any) -> LeafTopology:
        return {'positions': entry}

    def _pack(self, params: Any, topology: Topology | None) -> tuple[Any, Topology]:
        leaves = self.products.by_name(params)
        seed_key = seeds.prng_key(self.moves.rng_seed)
        keys = seeds.split_key(seed_key, len(self.layouts))
        packed, stored = {}, {}
        for name, key in zip(self.layouts, keys, strict=True):
            leaf = leaves[name]
            block_leaf = self._block_leaf(name)
            if topology is None:
                positions = block_leaf.largest_blocks(leaf)
            else:
                positions = topology[name]
            stored[name] = block_leaf.store(leaf, positions, key)
            packed[name] = jnp.asarray(positions, jnp.int32)
        return self.products.put(params, stored), packed

    def _block_leaf(self, name: str) -> BlockLeaf:
        return BlockLeaf(self.products.by_leaf[name], self.layouts[name])


def balanced_positions(layouts: Mapping[str, Layout], moves: MoveSettings) -> dict[str, np.ndarray]:
    """The positions at which training starts."""
    topology = {}
    for number, (name, layout) in enumerate(layouts.items()):
        rng = moves.host_rng(number)
        topology[name] = block_positions.balanced(layout, rng)
    return topology
