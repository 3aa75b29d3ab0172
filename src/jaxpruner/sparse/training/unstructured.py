"""A model of whose matrices single weights are kept and trained: values, and whole numbers that say where."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import sparsity_distributions, sparsity_schedules
from jaxpruner.base_updater import elementwise_optimizers
from jaxpruner.core import control, kept_positions, seeds
from jaxpruner.core import tree as tree_lib
from jaxpruner.mask_calculator import selection
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.operators.csr import CsrMatrix
from jaxpruner.sparse.program.matrices import Product
from jaxpruner.sparse.program.models import Products, find_products
from jaxpruner.sparse.training import choosing, moving
from jaxpruner.sparse.training import unstructured_positions as positions_lib
from jaxpruner.sparse.training.choosing import Names
from jaxpruner.sparse.training.layouts import NoLayoutError
from jaxpruner.sparse.training.moving import MoveSettings
from jaxpruner.sparse.training.plans import BlockPlan, PlannedLeaf
from jaxpruner.sparse.training.unstructured_positions import Arrays, KeptWeights

Topology = Mapping[str, Arrays]
Gradients = Mapping[str, jax.Array]
_HEADING = 'kept weights, or why it stays dense'


def unstructured_sparse(
    apply_fn: Callable[..., Any],
    params: Any,
    *sample: Any,
    sparsity: float | Mapping[Any, float | None],
    only: Names | None = None,
    algorithm: str = 'static_sparse',
    scheduler: sparsity_schedules.BaseSchedule | None = None,
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.3),
    rng_seed: int = 8,
) -> 'UnstructuredSparse':
    """Makes a model of which single weights are stored, multiplied and trained: faster than dense from about 90 % on.

    It trains as the dense model under an unstructured mask does, static, by SET or by RigL, with an optimizer that
    treats each weight by itself. Products run through JAX's kernel for matrices in CSR, which it has for CPUs, float32
    and float64, from 0.6.1 on. Below 95 % blocks (`block_sparse`) are faster.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: the parameters, arrays or shapes.
      *sample: inputs, arrays or shapes.
      sparsity: the share of the weights of each matrix that is not stored, or by name or glob of the leaf.
      only: names or globs of the leaves that are meant; by default all matrices but convolutions.
      algorithm: `'static_sparse'`, `'set'` or `'rigl'`, as in configurations.
      scheduler: when weights are replaced, such as `PeriodicSchedule`; by default never. Its sparsity may not change.
      drop_fraction_fn: step -> the share of the kept weights that is replaced then.
      rng_seed: of positions.

    Returns:
      A model that holds no arrays: `pack` makes them.

    Raises:
      NotImplementedError: there is no kernel for this dtype, device or version of JAX; the message says what helps.
      ValueError: a setting is out of range, or a name means no matrix.
      TypeError: a setting has the wrong type.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> if csr_kernel.why_missing(jnp.float32) is None:
    ...     model = unstructured_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.95)
    ...     weights, topology = model.pack(params)
    ...     assert weights['kernel']['compressed'].shape == (26,)
    """
    for name, value in choosing.by_name(sparsity, 'sparsity').items():
        if value is not None:
            sparsity_distributions.check_sparsity(value, name)
    schedule = sparsity_schedules.NoUpdateSchedule() if scheduler is None else scheduler
    moves = MoveSettings(algorithm, schedule, drop_fraction_fn, rng_seed)
    products = find_products(apply_fn, params, *sample)
    leaves, reasons = _choose(products, sparsity, only)
    return UnstructuredSparse(products, leaves, _plan(products, leaves, reasons), moves)


def _choose(
    products: Products, sparsity: Any, only: Names | None
) -> tuple[dict[str, KeptWeights], dict[str, str]]:
    """The leaves of which single weights are kept, and why the others stay dense."""
    reasons = dict(products.refused)
    paths = [product.path for product in products.by_leaf.values()]
    names = None if only is None else tree_lib.as_names(only)
    refused_paths = [tuple(name.split('/')) for name in reasons]
    tree_lib.check_names(names or (), paths + refused_paths, 'only')
    choosing.check_not_refused(names or (), paths, reasons)
    sparsity_of = choosing.lookup(sparsity, paths, 'sparsity')
    leaves = {}
    for name, product in products.by_leaf.items():
        try:
            leaves[name] = _kept_weights(product, names, sparsity_of(product.path))
        except NoLayoutError as error:
            reasons[name] = str(error)
    if not leaves:
        why = '; '.join([f'{name}: {reason}' for name, reason in list(reasons.items())[:8]])
        raise ValueError(f'no leaf of the model can be trained in CSR. {why}')
    return leaves, reasons


def _kept_weights(product: Product, only: Any, sparsity: float | None) -> KeptWeights:
    """How many weights of a leaf are kept; says why it stays dense otherwise."""
    if only is not None and not tree_lib.matches_any(only, product.path):
        raise NoLayoutError('no name in only matches it')
    if not sparsity:
        raise NoLayoutError('its sparsity is 0' if sparsity == 0 else 'it has no sparsity')
    if product.op == 'conv' and not choosing.is_named_in_full(only, product.path):
        raise NoLayoutError(
            'it is a convolution, whose windows would be gathered into rows; name it in only, in full'
        )
    missing = csr_kernel.why_missing(product.computed_dtype)
    if missing:
        raise NotImplementedError(f'{product.name} cannot be trained in CSR: {missing}')
    kept = selection.number_to_keep_on_host(product.inputs * product.outputs, sparsity)
    return KeptWeights(product.layers, product.inputs, product.outputs, kept)


def _plan(
    products: Products, leaves: Mapping[str, KeptWeights], reasons: Mapping[str, str]
) -> BlockPlan:
    planned = {}
    paths, shapes, _ = tree_lib.flatten_with_paths(products.params)
    for path, shape in zip(paths, shapes, strict=True):
        name = tree_lib.path_string(path)
        leaf = leaves.get(name)
        kept = shape.size if leaf is None else leaf.kept * int(np.prod(leaf.layers))
        planned[name] = PlannedLeaf(name, shape.shape, leaf, kept, reasons.get(name, ''))
    return BlockPlan(planned, _HEADING)


@dataclasses.dataclass(frozen=True)
class UnstructuredSparse:
    """A model in CSR, as `unstructured_sparse` makes it. It holds no arrays; weights and topology go through it.

    Weights are the tree of the parameters, with a dictionary in the place of a leaf of which single weights are kept:
    `'compressed'`, `[*layers, kept]`, row by row. The topology has by name of the leaf int32 arrays: `'positions'` in
    the flattened matrix, `'row_offsets'`, and what the transposed matrix needs, `'transposed_order'` and
    `'transposed_row_offsets'`. That is 8 bytes a kept weight.

    Attributes:
      products: the matrices of the model.
      leaves: how many weights are kept, by name.
      plan: what becomes of each leaf; it prints as a table.
      moves: when weights are replaced, and by which.

    >>> UnstructuredSparse.__dataclass_params__.frozen
    True
    """

    products: Products
    leaves: Mapping[str, KeptWeights]
    plan: BlockPlan
    moves: MoveSettings

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
          select: where they are otherwise: at `'random'`, or the largest (`'magnitude'`), for a trained model.

        Returns:
          Weights and topology.

        Raises:
          ValueError: positions that do not fit the model, or an unknown way to select.
        """
        if topology is not None:
            self._check_topology(topology)
        elif select not in ('random', 'magnitude'):
            near = tree_lib.nearest(str(select), ('random', 'magnitude'))
            raise ValueError(f'select={select!r} is unknown; {near}')
        stored, packed = {}, {}
        parameters = self.products.leaves(params)
        for number, (name, leaf) in enumerate(self.leaves.items()):
            matrices = self.products.by_leaf[name].to_matrix(parameters[name])
            if topology is not None:
                packed[name] = dict(topology[name])
            elif select == 'magnitude':
                packed[name] = leaf.arrays_of(positions_lib.largest(leaf, matrices))
            else:
                rng = np.random.default_rng([self.moves.rng_seed, number])
                packed[name] = leaf.arrays_of(jnp.asarray(positions_lib.drawn(leaf, rng)))
            compressed = positions_lib.gathered(leaf, matrices, packed[name]['positions'])
            stored[name] = {'compressed': compressed}
        return self.products.put(params, stored), packed

    def apply(
        self, weights: Any, topology: Topology, *inputs: Any, probe: Gradients | None = None
    ) -> Any:
        """Runs the model.

        Args:
          weights: as `pack` returns them.
          topology: where they are kept.
          *inputs: of the model; other shapes than those of the sample are traced anew.
          probe: `model.probe()`, where the gradients of whole matrices are wanted: they are the gradient with respect
            to it.

        Returns:
          What the model returns for `unpack(weights, topology)`.
        """
        operators = {}
        for name, stored in self._stored(weights).items():
            operators[name] = CsrMatrix(
                stored['compressed'],
                positions_lib.pattern_of(topology[name]),
                None if probe is None else probe[name],
            )
        return self.products.apply(self.products.put(weights, operators), *inputs)

    def probe(self) -> dict[str, jax.Array]:
        """Zeros for each matrix, float32 `[*layers, inputs, outputs]` by name."""
        probe = {}
        for name, leaf in self.leaves.items():
            probe[name] = jnp.zeros((*leaf.layers, leaf.inputs, leaf.outputs))
        return probe

    def unpack(self, weights: Any, topology: Topology) -> Any:
        """The dense parameters, in the tree and dtypes of `pack`'s; zeros where nothing is kept."""
        dense = {}
        for name, stored in self._stored(weights).items():
            positions = topology[name]['positions']
            matrices = positions_lib.scattered(self.leaves[name], stored['compressed'], positions)
            dense[name] = self.products.by_leaf[name].from_matrix(matrices)
        return self.products.put(weights, dense)

    def masks(self, topology: Topology) -> Any:
        """The masks: a tree like the parameters of uint8, `None` for leaves that stay dense."""
        masks = {}
        for name, leaf in self.leaves.items():
            positions = topology[name]['positions']
            ones = jnp.ones(positions.shape, jnp.uint8)
            matrices = positions_lib.scattered(leaf, ones, positions)
            masks[name] = self.products.by_leaf[name].from_matrix(matrices)
        paths, _, treedef = tree_lib.flatten_with_paths(self.products.params)
        return jax.tree.unflatten(
            treedef, [masks.get(tree_lib.path_string(path)) for path in paths]
        )

    def wrap_optax(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer, which refuses at `init` what does not take the step of the masked dense model.

        Raises:
          ValueError: at `init`, for an optimizer that looks at more than single weights, such as muon and adafactor.
        """
        optimizer = optax.with_extra_args_support(tx)

        def init(params: Any) -> Any:
            # optax finds moments by an init with a placeholder, which has no leaves.
            if jax.tree.leaves(params):
                self._check_optimizer(optimizer, params)
            return optimizer.init(params)

        return optax.GradientTransformationExtraArgs(init, optimizer.update)

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
        """Replaces weights, if the schedule says so: the smallest leave, and as many come, at zero, without moments.

        It may be called in every step, inside `jax.jit`.

        Args:
          weights: as they are after the optimizer's step.
          topology: where they are kept.
          opt_state: of `tx`.
          tx: the optimizer.
          step: its number, an int32 scalar or a number of Python's.
          dense_grads: for RigL the gradient with respect to `probe()`, by name; or a function of weights and topology
            that computes it, and is run only if it is needed.
          due: whether to replace weights now, whatever the schedule says.

        Returns:
          Weights, topology and state of the optimizer.

        Raises:
          ValueError: RigL without gradients.
        """
        if self.moves.algorithm == moving.STATIC:
            return weights, topology, opt_state
        if due is None:
            due = self.moves.scheduler.is_mask_update_iter(step)

        def move(state: Any, step: Any) -> Any:
            return self._move(*state, tx=tx, step=step, dense_grads=dense_grads)

        return control.run_once(due, move, (weights, dict(topology), opt_state), step)

    def _move(
        self,
        weights: Any,
        topology: Topology,
        opt_state: Any,
        *,
        tx: Any,
        step: Any,
        dense_grads: Any,
    ) -> Any:
        grads: Any = dense_grads(weights, topology) if callable(dense_grads) else dense_grads
        scores = self._grow_scores(grads, step)
        fraction = self.moves.drop_fraction_fn(step)
        moved, new_topology, places = {}, {}, {}
        for name, stored in self._stored(weights).items():
            leaf = self.leaves[name]
            old = topology[name]['positions']
            new, places[name] = positions_lib.replaced(
                leaf, stored['compressed'], old, scores[name], fraction
            )
            moved[name] = {'compressed': kept_positions.moved(stored['compressed'], places[name])}
            new_topology[name] = leaf.arrays_of(new)
        nothing = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), self.products.params)
        places = {name: {'compressed': where} for name, where in places.items()}
        opt_state = kept_positions.move_moments(tx, opt_state, self.products.put(nothing, places))
        return self.products.put(weights, moved), new_topology, opt_state

    def _grow_scores(self, grads: Gradients | None, step: Any) -> dict[str, jax.Array]:
        """Magnitudes of the gradients of whole matrices, or chance."""
        if self.moves.algorithm == moving.RIGL:
            if grads is None:
                raise ValueError(
                    'update: rigl regrows by dense_grads, the gradient of the loss with respect to model.probe(); '
                    'pass them, or a function that computes them, or use set'
                )
            return {name: jnp.abs(grads[name]) for name in self.leaves}
        keys = seeds.split_key(seeds.prng_key(self.moves.rng_seed, step), len(self.leaves))
        scores = {}
        for (name, leaf), key in zip(self.leaves.items(), keys, strict=True):
            shape = (*leaf.layers, leaf.inputs, leaf.outputs)

            def draw(key: jax.Array, shape: tuple[int, ...] = shape) -> jax.Array:
                return jax.random.uniform(key, shape)

            scores[name] = control.draw_in_loop(draw, key)
        return scores

    def _check_optimizer(self, tx: optax.GradientTransformationExtraArgs, weights: Any) -> None:
        def shape_of(array: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype)

        compact = jax.tree.map(shape_of, weights)
        dense = {}
        for name, leaf in self.leaves.items():
            shape = (*leaf.layers, leaf.inputs * leaf.outputs)
            dtype = self.products.by_leaf[name].dtype
            dense[name] = {'compressed': jax.ShapeDtypeStruct(shape, dtype)}
        whole = self.products.put(compact, dense)
        elementwise_optimizers.check_elementwise(tx, whole, compact, masks_gradients=True)

    def _check_topology(self, topology: Topology) -> None:
        for name, leaf in self.leaves.items():
            expected = (*leaf.layers, leaf.kept)
            found = jnp.shape(topology[name]['positions']) if name in topology else None
            if found != expected:
                raise ValueError(
                    f'topology: {name!r} must have positions of shape {expected}, got {found}; use that of a model '
                    'made with the same settings'
                )

    def _stored(self, weights: Any) -> dict[str, Any]:
        """What is stored of each leaf of which single weights are kept, by name."""
        entries = jax.tree.structure(self.products.params).flatten_up_to(weights)
        paths = tree_lib.flatten_with_paths(self.products.params)[0]
        by_name = dict(zip(map(tree_lib.path_string, paths), entries, strict=True))
        return {name: by_name[name] for name in self.leaves}
