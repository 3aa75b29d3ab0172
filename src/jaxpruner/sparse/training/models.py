"""A model whose matrices are trained as blocks: values that any optimizer trains, and whole numbers that say where."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.core import control, optimizer_state, seeds
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparse.operators.block_kernels.product import multiply as multiply_in_kernel
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training import conversion, moving, optimizers, positions
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.sparse.training.moving import MoveSettings
from jaxpruner.sparse.training.placement import Placement
from jaxpruner.sparse.training.plans import BlockPlan

Topology = Mapping[str, Any]  # arrays of whole numbers
Norms = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class BlockSparse:
    """A model in blocks, as `block_sparse` makes it. It holds no arrays; weights and topology go through it.

    Weights are the tree of the parameters. In the place of a leaf that is trained in blocks stands a dictionary:
    `'values'`, `[*layers, groups, blocks, in, out]`, and with a term of low rank `'down'`, `[*layers, inputs, rank]`,
    and `'up'`, `[*layers, rank, outputs]`. The topology has the positions of the blocks by name of the leaf,
    int32 `[*layers, groups, blocks]`.

    Attributes:
      products: the matrices of the model.
      layouts: the blocks of each leaf that is trained in blocks, by name.
      plan: what becomes of each leaf; it prints as a table.
      moves: when blocks move, and where to.
      placement: over which devices they are spread.

    >>> import jaxpruner
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> model = jaxpruner.sparse.block_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.75, block=(4, 8))
    >>> weights, topology = model.pack(params)
    >>> jax.tree.map(jnp.shape, (weights, topology))
    ({'bias': (32,), 'kernel': {'values': (4, 1, 4, 8)}}, {'kernel': (4, 1)})
    """

    products: Products
    layouts: Mapping[str, Layout]
    plan: BlockPlan
    moves: MoveSettings
    placement: Placement

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
          select: where they are otherwise. `'balanced'` draws them such that all inputs lead to as many groups;
            `'magnitude'` takes the blocks of each group with the largest norms, for a model that is trained already.

        Returns:
          Weights and topology. The term of low rank starts at zero: `'down'` is random, and `'up'` zero.

        Raises:
          ValueError: positions that do not fit the model, or an unknown way to select.
        """
        if topology is not None:
            self._check_topology(topology)
        elif select == 'balanced':
            topology = balanced_positions(self.layouts, self.moves.rng_seed)
        elif select != 'magnitude':
            near = tree_lib.nearest(str(select), ('balanced', 'magnitude'))
            raise ValueError(f'select={select!r} is unknown; {near}')
        pack = self._pack if tree_lib.has_traced((params, topology)) else jax.jit(self._pack)
        return self._placed(*pack(params, topology))

    def apply(
        self, weights: Any, topology: Topology, *inputs: Any, probe: Norms | None = None
    ) -> Any:
        """Runs the model.

        Args:
          weights: as `pack` returns them.
          topology: where their blocks are.
          *inputs: of the model; other shapes than those of the sample are traced anew.
          probe: `model.probe()`, where the norms of the blocks of the dense gradient are wanted: they are the gradient
            with respect to it.

        Returns:
          What the model returns for `unpack(weights, topology)`.
        """
        operators = {}
        for name, stored in self._stored(weights).items():
            layout = self.layouts[name]
            operators[name] = BlockMatrix(
                **stored,
                indices=topology[name],
                outputs=layout.outputs,
                probe=None if probe is None else probe[name],
                shards=self.placement.shards_of(layout),
                kernel=multiply_in_kernel if layout.in_kernel else None,
            )
        return self.products.apply(self._put(weights, operators), *inputs)

    def probe(self) -> dict[str, jax.Array]:
        """Zeros for each candidate block, float32 `[*layers, groups, candidates]` by name.

        >>> # norms = jax.grad(loss, argnums=2)(weights, topology, model.probe(), batch)
        """
        probe = {}
        for name, layout in self.layouts.items():
            probe[name] = jnp.zeros((*layout.layers, layout.groups, layout.candidates))
        return probe

    def unpack(self, weights: Any, topology: Topology) -> Any:
        """The dense parameters, in the tree and dtypes of `pack`'s.

        With a term of low rank the product of its matrices is added, so that nothing of them is zero; `masks` says
        where the blocks are.
        """
        leaves = {}
        for name, stored in self._stored(weights).items():
            of_leaf = self.products.by_leaf[name], self.layouts[name]
            leaves[name] = conversion.restore(stored, topology[name], *of_leaf)
        return self._put(weights, leaves)

    def masks(self, topology: Topology) -> Any:
        """The masks of the blocks: a tree like the parameters of uint8, `None` for leaves that stay dense."""
        masks = {}
        for name, layout in self.layouts.items():
            product = self.products.by_leaf[name]
            masks[name] = conversion.mask_of(topology[name], product, layout)
        return self._tree({name: masks.get(name) for name in self._names})

    def wrap_optax(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer, which refuses at `init` what does not take the step of the masked dense model.

        Raises:
          ValueError: at `init`, for optimizers that look at shapes, such as muon and adafactor; also for those whose
            moments cannot be set to zero, if blocks move.
        """

        def init(params: Any) -> Any:
            self._check_optimizer(tx, params)
            return tx.init(params)

        return optax.GradientTransformationExtraArgs(init, optax.with_extra_args_support(tx).update)

    def update(
        self,
        weights: Any,
        topology: Topology,
        opt_state: Any,
        *,
        tx: optax.GradientTransformation,
        step: Any,
        block_norms: Norms | Callable[[Any, Topology], Norms] | None = None,
        due: Any = None,
    ) -> tuple[Any, Topology, Any]:
        """Moves blocks, if the schedule says so: those with the smallest norms leave, and as many come.

        Each group replaces `floor(fraction * blocks)` of its blocks, at least one. One stays, unless the fraction is 1.
        A block that comes starts at zero, with moments of zero. It may be called in every step, inside `jax.jit`.

        Args:
          weights: as they are after the optimizer's step.
          topology: where their blocks are.
          opt_state: of `tx`.
          tx: the optimizer.
          step: its number, an int32 scalar or a number of Python's.
          block_norms: for RigL the gradient with respect to `probe()`, by name; or a function of weights and topology
            that computes it, and is run only if it is needed.
          due: whether to move now, whatever the schedule says.

        Returns:
          Weights, topology and state of the optimizer.

        Raises:
          ValueError: RigL without norms, or an optimizer that `wrap_optax` refuses.
        """
        self._check_optimizer(tx, weights)
        if self.moves.algorithm == moving.STATIC:
            return weights, topology, opt_state
        if due is None:
            due = self.moves.scheduler.is_mask_update_iter(step)

        def move(state: Any, step: Any) -> Any:
            return self._move(*state, tx=tx, step=step, block_norms=block_norms)

        return control.run_once(due, move, (weights, topology, opt_state), step)

    def _move(
        self,
        weights: Any,
        topology: Topology,
        opt_state: Any,
        *,
        tx: Any,
        step: Any,
        block_norms: Any,
    ) -> tuple[Any, Topology, Any]:
        norms: Any = block_norms(weights, topology) if callable(block_norms) else block_norms
        scores = moving.grow_scores(self.moves, self.layouts, norms, step)
        stored = self._stored(weights)
        values = {name: leaf['values'] for name, leaf in stored.items()}
        replacements = moving.replaced(self.moves, values, topology, scores, step)
        is_new, moved = {}, {}
        for name, leaf in stored.items():
            flags = replacements[name].is_new[..., None, None]
            is_new[name] = {
                **dict.fromkeys(leaf),
                'values': jnp.broadcast_to(flags, leaf['values'].shape),
            }
            moved[name] = {**leaf, 'values': jnp.where(flags, 0, leaf['values'])}
        flags = self._tree({name: is_new.get(name) for name in self._names})
        opt_state = optimizer_state.zero_moments(tx, opt_state, flags, weights)
        topology = {name: replacement.indices for name, replacement in replacements.items()}
        return self._put(weights, moved), topology, opt_state

    def _pack(self, params: Any, topology: Topology | None) -> tuple[Any, Topology]:
        positions_by_name, stored = {}, {}
        leaves = dict(zip(self._names, self._structure.flatten_up_to(params), strict=True))
        keys = seeds.split_key(seeds.prng_key(self.moves.rng_seed), len(self.layouts))
        for (name, layout), key in zip(self.layouts.items(), keys, strict=True):
            of_leaf = self.products.by_leaf[name], layout
            if topology is None:
                indices = conversion.largest_blocks(leaves[name], *of_leaf)
            else:
                indices = topology[name]
            stored[name] = conversion.store(leaves[name], indices, *of_leaf, key)
            positions_by_name[name] = jnp.asarray(indices, jnp.int32)
        return self._put(params, stored), positions_by_name

    def _placed(self, weights: Any, topology: Topology) -> tuple[Any, Topology]:
        """On the devices of the mesh, if there is one; leaves that stay dense are left where they are."""
        if self.placement.mesh is None:
            return weights, topology
        stored, placed = {}, {}
        for name, leaf in self._stored(weights).items():
            layout = self.layouts[name]
            values = self.placement.place_groups(leaf['values'], layout)
            stored[name] = {**leaf, 'values': values}
            placed[name] = self.placement.place_groups(topology[name], layout)
            for key in leaf.keys() - {'values'}:
                stored[name][key] = self.placement.replicate(leaf[key])
        return self._put(weights, stored), placed

    def _check_topology(self, topology: Topology) -> None:
        for name, layout in self.layouts.items():
            expected = (*layout.layers, layout.groups, layout.blocks)
            found = jnp.shape(topology[name]) if name in topology else None
            if found != expected:
                raise ValueError(
                    f'topology: {name!r} must have positions of shape {expected}, got {found}; use that of a model '
                    'made with the same settings'
                )

    def _check_optimizer(self, tx: optax.GradientTransformation, weights: Any) -> None:
        optimizers.check_optimizer(tx, weights, self.moves.moves_blocks)

    @property
    def _names(self) -> list[str]:
        return [tree_lib.path_string(path) for path in tree_lib.flatten_with_paths(self._params)[0]]

    @property
    def _params(self) -> Any:
        return self.products.params

    @property
    def _structure(self) -> Any:
        return jax.tree.structure(self._params)

    def _tree(self, entries: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self._structure, [entries[name] for name in self._names])

    def _put(self, tree: Any, entries: Mapping[str, Any]) -> Any:
        """The tree with other entries in the place of some leaves."""
        leaves = dict(zip(self._names, self._structure.flatten_up_to(tree), strict=True))
        return self._tree({**leaves, **entries})

    def _stored(self, weights: Any) -> dict[str, dict[str, Any]]:
        """What is trained in blocks, by name."""
        leaves = dict(zip(self._names, self._structure.flatten_up_to(weights), strict=True))
        return {name: leaves[name] for name in self.layouts}


def balanced_positions(layouts: Mapping[str, Layout], seed: int) -> dict[str, np.ndarray]:
    """The positions at which training starts."""
    topology = {}
    for number, (name, layout) in enumerate(layouts.items()):
        topology[name] = positions.balanced(layout, np.random.default_rng([seed, number]))
    return topology
