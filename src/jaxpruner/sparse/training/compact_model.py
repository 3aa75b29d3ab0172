"""Models of which some leaves are stored compactly: weights that an optimizer trains, and where they stand."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
from optax import tree_utils

from jaxpruner import (
    caller_warnings,
    checks,
    control,
    seeds,
    selection,
    sparsity_distributions,
    sparsity_schedules,
)
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.sparse import csr_matrix
from jaxpruner.sparse.block_matrix import BlockShape
from jaxpruner.sparse.products import MatrixLeaf, Products
from jaxpruner.sparse.training.layouts import Layout, moved
from jaxpruner.text_tables import Column, to_text

# By name of the leaf: whole numbers that say where its weights are.
Topology = Mapping[str, Mapping[str, Any]]
Gradients = Mapping[str, jax.Array]  # by name of the leaf

STATIC, RIGL = 'static_sparse', 'rigl'
# The names in configurations. All but the first drop the blocks or weights of the smallest magnitudes.
ALGORITHMS = (STATIC, 'set', RIGL)

_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('shape', overflow='fold'),
    Column('stored, or why it stays dense', overflow='wrap'),
    Column('kept', align='right'),
    Column('of', align='right'),
)


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """A leaf of a model that is trained on compact weights.

    Attributes:
      name: its path as text.
      shape: of the dense leaf.
      layout: its blocks, or how many weights are kept; `None` if it stays dense.
      kept: weights that are trained, with those of the term of low rank.
      note: why it stays dense, or a remark.

    >>> PlannedLeaf('bias', (4,), None, kept=4, note='no contraction reads it').size
    4
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None
    kept: int
    note: str = ''

    @property
    def size(self) -> int:
        """Weights of the dense leaf."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """What becomes of the leaves of a model that is trained on blocks or on single weights; it prints as a table.

    Attributes:
      leaves: by name, in the tree's order.

    >>> plan = BlockPlan({'bias': PlannedLeaf('bias', (4,), None, kept=4, note='no contraction reads it')})
    >>> print(plan)
    leaf   shape  stored, or why it stays dense   kept  of
    ------------------------------------------------------
    bias   4      dense: no contraction reads it     4   4
    ------------------------------------------------------
    total         sparsity 0                         4   4
    """

    leaves: Mapping[str, PlannedLeaf]

    @property
    def kept(self) -> int:
        """Weights that are trained."""
        return sum(leaf.kept for leaf in self.leaves.values())

    @property
    def size(self) -> int:
        """Weights of the dense model."""
        return sum(leaf.size for leaf in self.leaves.values())

    def __str__(self) -> str:
        rows = []
        for name, leaf in self.leaves.items():
            stored = leaf.layout.words if leaf.layout else 'dense'
            words = ': '.join(filter(None, [stored, leaf.note]))
            shape = '×'.join(map(str, leaf.shape))
            rows.append([name, shape, words, f'{leaf.kept:,}', f'{leaf.size:,}'])
        sparsity = 1 - self.kept / max(self.size, 1)
        total = ['total', '', f'sparsity {sparsity:.4g}', f'{self.kept:,}', f'{self.size:,}']
        return to_text(_COLUMNS, rows, total)


@dataclasses.dataclass(frozen=True)
class CompactModel:
    """A model in blocks or in CSR, as `block_sparse` and `unstructured_sparse` make it.

    It holds no arrays; weights and topology go through it. Weights are the tree of the parameters. In the place of a
    leaf that is stored compactly stands a dictionary:

    - blocks: `'values'`, `[*layers, groups, blocks, in, out]`, and with a term of low rank `'down'`,
      `[*layers, inputs, rank]`, and `'up'`, `[*layers, rank, outputs]`;
    - single weights: `'compressed'`, `[*layers, kept]`, in the order of the matrix transposed.

    The topology has int32 arrays for each of these leaves, by name. `'positions'` says which blocks each group of
    outputs stores, `[*layers, groups, blocks]`, or where single weights stand in the flattened `[outputs, inputs]`.
    Single weights also have what the kernel reads: 8 bytes a kept weight.

    Attributes:
      products: the matrices of the model.
      plan: what becomes of each leaf; it prints as a table.
      layouts: how each leaf is stored that is stored compactly, by name.
      algorithm: `'static_sparse'`, `'set'` or `'rigl'`.
      scheduler: in which steps something is dropped and grown.
      drop_fraction_fn: step -> the share of the stored blocks or weights of each matrix that is dropped.
      rng_seed: of positions drawn at random.

    >>> import jaxpruner
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> model = jaxpruner.sparse.block_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.75, block=(4, 8))
    >>> weights, topology = model.pack(params)
    >>> jax.tree.map(jnp.shape, (weights, topology))
    ({'bias': (32,), 'kernel': {'values': (4, 1, 4, 8)}}, {'kernel': {'positions': (4, 1)}})
    """

    products: Products
    plan: BlockPlan
    layouts: Mapping[str, Layout]
    algorithm: str
    scheduler: sparsity_schedules.BaseSchedule
    drop_fraction_fn: Callable[[Any], Any]
    rng_seed: Any

    def pack(
        self,
        params: Any,
        topology: Topology | None = None,
        *,
        select: Literal['random', 'magnitude'] = 'random',
    ) -> tuple[Any, Topology]:
        """Takes what is stored out of parameters.

        Args:
          params: the dense parameters.
          topology: where blocks or weights are, as from an earlier call.
          select: what is stored if there is no topology: `'random'` blocks or weights, or for a trained model the
            largest (`'magnitude'`). Random blocks are drawn such that all inputs lead to about the same number of
            groups.

        Returns:
          Weights and topology. A term of low rank starts at zero: `'down'` is random, and `'up'` zero.

        Raises:
          ValueError: a leaf has another shape than in the model, or an unknown way to select.
        """
        if select not in ('random', 'magnitude'):
            raise ValueError(f"select={select!r} is unknown; take 'random' or 'magnitude'")
        positions: dict[str, Any] = {}
        if topology is not None:
            positions = {name: topology[name]['positions'] for name in self.layouts}
        elif select == 'random':  # drawn by NumPy, with a generator of its own for each leaf
            words = [self.rng_seed]
            if not isinstance(self.rng_seed, int):
                words = np.asarray(jax.random.key_data(seeds.prng_key(self.rng_seed))).tolist()
            for number, (name, layout) in enumerate(self.layouts.items()):
                positions[name] = layout.draw(np.random.default_rng([*words, number]))

        def pack(params: Any, positions: Mapping[str, Any]) -> tuple[Any, Topology]:
            stored, packed = {}, {}
            keys = seeds.split_key(seeds.prng_key(self.rng_seed), len(self.layouts))
            leaves = self.products.leaves(params)
            for (name, layout), key in zip(self.layouts.items(), keys, strict=True):
                matrices = self.products.by_leaf[name].to_matrix(leaves[name])
                at = positions[name] if positions else layout.largest(matrices)
                packed[name] = layout.topology(at)
                stored[name] = layout.store(matrices, packed[name]['positions'], key)
            return self.products.put(params, stored), packed

        return jax.jit(pack)(params, positions)

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
            operators[name] = self.layouts[name].operator(stored, topology[name], probe_of_leaf)
        with_operators = self.products.put(weights, operators)
        return self.products.apply(with_operators, *inputs)

    def probe(self) -> dict[str, jax.Array]:
        """Zeros, float32 by name of the leaf, for all blocks or weights that could be kept: RigL grows by them.

        The probe changes no result, so its derivative is zero. The backward pass returns something else in place of
        that:

        - for single weights, `[*layers, outputs * inputs]`, the gradient with respect to the dense matrix transposed;
        - for blocks, `[*layers, groups, blocks of inputs]`, the norm of each block of that gradient. If a leaf is
          multiplied at several places, in several trips of a loop, or under a `jax.vmap` around `apply`, these norms
          are added. Their sum is at least the norm of the gradient, and larger where gradients cancel.

        >>> # gradients = jax.grad(loss, argnums=2)(weights, topology, model.probe(), batch)
        """
        shapes = {name: (*each.rows, each.candidates) for name, each in self.layouts.items()}
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def unpack(self, weights: Any, topology: Topology) -> Any:
        """The dense parameters, in the tree and dtypes that `pack` was given; zeros where nothing is kept.

        With a term of low rank the product of its two matrices is added, so no weight stays zero; `masks` says where
        the blocks are.
        """
        leaves = {}
        for name, stored in self._stored(weights).items():
            matrices = self.layouts[name].restore(stored, topology[name]['positions'])
            leaves[name] = self.products.by_leaf[name].from_matrix(matrices)
        return self.products.put(weights, leaves)

    def masks(self, topology: Topology) -> Any:
        """The masks: a tree like the parameters, uint8, with `None` for leaves that stay dense."""
        masks: dict[str, Any] = dict.fromkeys(self.plan.leaves)
        for name, layout in self.layouts.items():
            matrices = layout.mask(topology[name]['positions'])
            masks[name] = self.products.by_leaf[name].from_matrix(matrices)
        return self.products.unflatten(masks)

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
                shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
                compact, whole = jax.tree.map(shape, params), {}
                for name, stored in self._stored(compact).items():
                    key = self.layouts[name].values_key
                    whole[name] = {**stored, key: shape(self.products.by_leaf[name])}
                if self.algorithm != STATIC:
                    sparse_state_lib.check_restartable(optimizer, compact)
                check_elementwise(optimizer, self.products.put(compact, whole), compact)
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
        probe_grads: Gradients | Callable[[Any, Topology], Gradients] | None = None,
    ) -> tuple[Any, Topology, Any]:
        """Drops the smallest blocks or weights and grows as many others, if the schedule says so.

        Of each matrix, `round(fraction * stored)` blocks or weights are dropped. Blocks are ranked by their mean
        square; each group grows as many as it dropped, and keeps its largest block, unless the fraction is 1. What is
        grown starts at zero, with moments of zero. This may be called in every step, inside `jax.jit`.

        Args:
          weights: as they are after the optimizer's step.
          topology: where they are kept.
          opt_state: of `tx`.
          tx: the optimizer.
          step: its number, an int32 scalar or a Python int.
          probe_grads: for RigL, what the backward pass returns for `probe()`, by name. Or a function of weights and
            topology that computes it, which runs only if it is needed.

        Returns:
          Weights, topology and state of the optimizer.

        Raises:
          ValueError: RigL without gradients.
        """
        if self.algorithm == STATIC:
            return weights, topology, opt_state
        due = self.scheduler.is_mask_update_iter(step)

        def move_moment(moment: Any, where: Any) -> Any:
            if not where.ndim or jnp.shape(moment)[: where.ndim] != where.shape:
                return moment
            return moved(moment, where)

        def move(state: tuple[Any, Any, Any], step: Any) -> tuple[Any, Any, Any]:
            weights, topology, opt_state = state
            gradients = probe_grads(weights, topology) if callable(probe_grads) else probe_grads
            scores = self._grow_scores(step, gradients)
            fraction = self.drop_fraction_fn(step)
            checks.check_drop_fraction(fraction, f'drop_fraction_fn({step})')
            moved_weights, new_topology, places = {}, {}, {}
            for name, stored in self._stored(weights).items():
                layout = self.layouts[name]
                values, positions = stored[layout.values_key], topology[name]['positions']
                new, where = layout.replace(values, positions, scores[name], fraction)
                new_topology[name] = layout.topology(new)
                moved_weights[name] = {**stored, layout.values_key: moved(values, where)}
                # The term of low rank keeps its moments.
                places[name] = {**dict.fromkeys(stored, _STAYS), layout.values_key: where}
            stays = jax.tree.map(lambda _: _STAYS, self.products.params)
            opt_state = tree_utils.tree_map_params(
                tx,
                move_moment,
                opt_state,
                self.products.put(stays, places),
                is_leaf=lambda node: isinstance(node, optax.MaskedNode),
            )
            return self.products.put(weights, moved_weights), new_topology, opt_state

        topology = {name: dict(arrays) for name, arrays in topology.items()}
        return control.run_once(due, move, (weights, topology, opt_state), step)

    def _grow_scores(self, step: Any, gradients: Gradients | None) -> Gradients:
        """Scores of all candidates. SET grows at random, drawn anew at each step; RigL where gradients are largest."""
        if self.algorithm == RIGL:
            if gradients is None:
                raise ValueError(
                    'update: rigl grows by probe_grads, the gradient of the loss with respect to model.probe(); pass '
                    'it, or a function that computes it, or use set'
                )
            return {name: jnp.abs(gradients[name]) for name in self.layouts}
        keys = seeds.split_key(seeds.prng_key(self.rng_seed, step), len(self.layouts))
        scores = {}
        for (name, layout), key in zip(self.layouts.items(), keys, strict=True):
            shape = (*layout.rows, layout.candidates)
            draw = functools.partial(jax.random.uniform, shape=shape)
            scores[name] = control.draw_in_loop(draw, key)
        return scores

    def _stored(self, weights: Any) -> dict[str, Any]:
        """The stored arrays of leaves that are stored compactly, by name."""
        by_name = self.products.by_name(weights)
        return {name: by_name[name] for name in self.layouts}


_STAYS = np.zeros((), np.int32)  # in the place of the positions of an array that does not move


def check_elementwise(
    optimizer: optax.GradientTransformation, params: Any, compact_params: Any
) -> None:
    """Refuses an optimizer that does not take the step of the masked dense model; computes nothing.

    It does if it treats each weight by itself, or sums over all of a leaf, to which pruned weights add nothing. So its
    update is traced twice, for the shapes of whole leaves and for those of compact ones. Both programs must have the
    same operations and the same numbers, such as the divisor of a mean. Those of optimizers that look along axes, such
    as muon and adafactor, depend on the number of axes.

    >>> shapes = {'w': jax.ShapeDtypeStruct((4, 2), 'float32')}
    >>> kept = {'w': jax.ShapeDtypeStruct((3,), 'float32')}
    >>> check_elementwise(optax.adam(0.1), shapes, kept)
    """
    outlines = []
    for shapes in (params, compact_params):
        state = jax.eval_shape(optimizer.init, shapes)
        program = jax.make_jaxpr(optimizer.update)(shapes, state, shapes).jaxpr
        outlines.append(_outline(program))
    if outlines[0] != outlines[1]:
        raise ValueError(
            'moments of kept weights alone (block_sparse, unstructured_sparse) need an optimizer that treats each '
            'weight by itself, and this one computes something else for other shapes, as muon, adafactor and clipping '
            'by blocks do; use sgd, adam, adamw, lion or rmsprop'
        )


def _outline(program: Any) -> list[Any]:
    """The operations of a program and of those inside of it, with the numbers among their operands."""
    outline = []
    for equation in program.eqns:
        literals = jax.extend.core.Literal
        numbers = [str(each) for each in equation.invars if isinstance(each, literals)]
        outline.append((equation.primitive.name, len(equation.invars), *numbers))
        for entry in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(entry, 'jaxpr', entry)
            if isinstance(inner, jax.extend.core.Jaxpr):
                outline += _outline(inner)
    return outline


Sparsities = float | Mapping[Any, float | None]

# A group keeps whole blocks, and at least one. A leaf has a surplus if it keeps more than this factor times the weights
# that were asked for.
_MOST_KEPT = 1.5


def block_sparse(
    apply_fn: Callable[..., Any],
    params: Any,
    *sample: Any,
    sparsity: Sparsities,
    block: BlockShape = (8, 128),
    low_rank: int = 0,
    algorithm: str = 'static_sparse',
    scheduler: sparsity_schedules.BaseSchedule | None = None,
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.3),
    rng_seed: Any = 8,
) -> CompactModel:
    """Makes a model in which only some blocks are stored, multiplied and trained, so that a step takes less time.

    Each matrix of the model, `[inputs, outputs]`, is cut into blocks. Every group of outputs stores the same number of
    blocks, so all arrays keep their shapes while blocks move. The optimizer's moments are as small as the values. A
    step is that of the dense model under `masks`, if the optimizer treats each weight by itself (sgd, adam, adamw,
    lion).

    Wide blocks are fast: 1 to 16 inputs by 128 to 512 outputs. Narrow ones, and a term of low rank, reach more inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: the parameters, arrays or shapes.
      *sample: inputs, arrays or shapes.
      sparsity: the share of the weights of each leaf that is not stored, below 1; for all matrices that blocks
        divide, or by name or glob. Leaves that no name matches stay dense, and so do convolutions.
      block: inputs and outputs of a block. Matrices that it does not divide stay dense.
      low_rank: rank of a dense term `down @ up` beside the blocks. Its weights count as kept ones.
      algorithm: `'static_sparse'`, `'set'` or `'rigl'`, as in configurations.
      scheduler: when blocks are dropped and grown, such as `PeriodicSchedule`; by default never. Its sparsity may not
        change.
      drop_fraction_fn: step -> the share of the blocks of each matrix that is dropped at this step. A group of a single
        block keeps it, unless the share is 1.
      rng_seed: the seed of positions, a whole number or a key.

    Returns:
      The model; its `plan` says what becomes of each leaf, and why some stay dense.

    Raises:
      ValueError: a sparsity outside [0, 1), a rank or block that does not fit, a name that means no matrix, a schedule
        whose sparsity changes, no leaf that can be trained in blocks.
      TypeError: a block that is no pair of numbers.

    Warns if blocks cannot reach all inputs, or are too coarse for the sparsity; the plan says so, too.

    >>> import jax, jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> model = block_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.75, block=(4, 8))
    >>> print(model.plan)
    leaf    shape  stored, or why it stays dense   kept   of
    --------------------------------------------------------
    bias    32     dense: no contraction reads it    32   32
    kernel  16×32  4 groups of 1 of 4 blocks 4×8    128  512
    --------------------------------------------------------
    total          sparsity 0.7059                  160  544
    >>> weights, topology = model.pack(params)
    >>> gradients = jax.grad(lambda weights: model.apply(weights, topology, jnp.ones((2, 16))).sum())(weights)
    >>> gradients['kernel']['values'].shape
    (4, 1, 4, 8)
    """
    is_pair = isinstance(block, tuple | list) and len(block) == 2
    if not is_pair or not all(isinstance(side, int) and side > 0 for side in block):
        raise TypeError(f'block must be inputs and outputs, such as (8, 128), got {block!r}')
    if not isinstance(low_rank, int) or low_rank < 0:
        raise ValueError(f'low_rank must be a whole number, 0 for none, got {low_rank!r}')
    height, width = block

    def layout_of(matrix_leaf: MatrixLeaf, sparsity: float) -> tuple[Layout | None, str]:
        if sparsity == 1:
            raise ValueError('sparsity must be below 1, since each group of outputs keeps a block')
        inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
        if inputs % height or outputs % width:
            return (
                None,
                f'blocks of {height} x {width} do not divide a matrix of {inputs} x {outputs}',
            )
        of_rank = (inputs + outputs) / (inputs * outputs)  # weights of a rank, as a share
        share = 1 - sparsity - low_rank * of_rank
        if low_rank and share <= 0:
            return None, (
                f'a term of rank {low_rank} has more weights than sparsity {sparsity} leaves of {inputs} x {outputs}; '
                f'the rank can be at most {math.ceil((1 - sparsity) / of_rank) - 1}'
            )
        of_inputs = inputs // height  # blocks in a group
        kept = min(max(1, round(share * of_inputs)), of_inputs)
        layout = Layout(matrix_leaf.layers, inputs, outputs, kept, (height, width), low_rank)
        kept_share, notes = kept / of_inputs + low_rank * of_rank, []
        if kept_share > _MOST_KEPT * (1 - sparsity):
            notes.append(f'{kept_share:.0%} are kept: take blocks of fewer inputs')
        coverage = layout.groups * kept / of_inputs
        if coverage < 1 and not low_rank:  # a term of low rank reaches all inputs
            most = max(1, outputs * kept // of_inputs)
            notes.append(f'reach {coverage:.0%} of the inputs: blocks of {most} outputs reach all')
        return layout, ', '.join(notes)

    products = Products(apply_fn, params, *sample)
    model = _made(products, layout_of, sparsity, algorithm, scheduler, drop_fraction_fn, rng_seed)
    leaves = [model.plan.leaves[name] for name in model.layouts]
    if notes := [f'{leaf.name}: {leaf.note}' for leaf in leaves if leaf.note]:
        caller_warnings.warn(f'block_sparse: blocks that do not suit: {"; ".join(notes)}')
    return model


def unstructured_sparse(
    apply_fn: Callable[..., Any],
    params: Any,
    *sample: Any,
    sparsity: Sparsities,
    algorithm: str = 'static_sparse',
    scheduler: sparsity_schedules.BaseSchedule | None = None,
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.3),
    rng_seed: Any = 8,
) -> CompactModel:
    """Makes a model in which single weights are stored, multiplied and trained: faster than dense from 90 % on.

    It trains like the dense model under an unstructured mask: static, by SET or by RigL, with an optimizer that treats
    each weight by itself. Products run through JAX's kernel for matrices in CSR. JAX has it from 0.6.1 on, for CPUs,
    float32 and float64. Blocks (`block_sparse`) are faster at any sparsity, and cost accuracy.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: the parameters, arrays or shapes.
      *sample: inputs, arrays or shapes.
      sparsity: the share of the weights of each matrix that is not stored, or by name or glob of the leaf. Leaves that
        no name matches stay dense, and so do convolutions.
      algorithm: `'static_sparse'`, `'set'` or `'rigl'`, as in configurations.
      scheduler: when weights are dropped and grown, such as `PeriodicSchedule`; by default never. Its sparsity may not
        change.
      drop_fraction_fn: step -> the share of the kept weights that is dropped then.
      rng_seed: the seed of positions, a whole number or a key.

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
    >>> if csr_matrix.why_missing(jnp.float32) is None:
    ...     model = unstructured_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.95)
    ...     weights, topology = model.pack(params)
    ...     assert weights['kernel']['compressed'].shape == (26,)
    """

    def layout_of(matrix_leaf: MatrixLeaf, sparsity: float) -> tuple[Layout, str]:
        if missing := csr_matrix.why_missing(matrix_leaf.computed_dtype):
            name = matrix_leaf.matrices.where
            raise NotImplementedError(f'{name} cannot be trained in CSR: {missing}')
        inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
        kept = selection.number_to_keep_on_host(inputs * outputs, sparsity)
        return Layout(matrix_leaf.layers, inputs, outputs, kept), ''

    products = Products(apply_fn, params, *sample)
    return _made(products, layout_of, sparsity, algorithm, scheduler, drop_fraction_fn, rng_seed)


def _made(
    products: Products,
    layout_of: Callable[[MatrixLeaf, float], tuple[Layout | None, str]],
    sparsity: Sparsities,
    algorithm: str,
    scheduler: sparsity_schedules.BaseSchedule | None,
    drop_fraction_fn: Callable[[Any], Any],
    rng_seed: Any,
) -> CompactModel:
    """A model in which the leaves that have a sparsity have the layouts of `layout_of`, with notes for the plan."""
    given = sparsity if isinstance(sparsity, Mapping) else {'*': sparsity}
    rules = sparsity_distributions.check_custom_map(given, 'sparsity')
    if algorithm not in ALGORITHMS:
        near = tree_lib.nearest(str(algorithm), ALGORITHMS)
        raise ValueError(f'algorithm {algorithm!r} does not train compact weights; {near}')
    scheduler = scheduler or sparsity_schedules.NoUpdateSchedule()
    target = 0.5
    if any(float(scheduler.get_sparsity_at_step(target, step)) != target for step in (0, 1, 1000)):
        raise ValueError(
            f'scheduler: {type(scheduler).__name__} changes the number of weights, and compact arrays keep their size; '
            'use PeriodicSchedule or StepsSchedule'
        )
    seeds.check_seed(rng_seed)
    checks.check_drop_fraction(drop_fraction_fn(0), 'drop_fraction_fn(0)')
    paths = products.paths
    sparsity_of = tree_lib.values_by_leaf(rules, list(paths.values()), 'sparsity')
    planned: dict[str, PlannedLeaf] = {}
    leaves = products.by_name(products.params).items()
    for i, (name, leaf) in enumerate(leaves):
        own_sparsity = sparsity_of.get(i)
        layout = None
        if name in products.refused:
            note = products.refused[name]
        elif not own_sparsity:
            note = 'its sparsity is 0' if own_sparsity == 0 else 'it has no sparsity'
        elif products.by_leaf[name].op == 'conv':
            note = 'it is a convolution; those are trained dense, or under masks'
        else:
            layout, note = layout_of(products.by_leaf[name], own_sparsity)
        if layout is None and own_sparsity and (name in rules or paths[name] in rules):
            raise ValueError(f'{name!r} cannot be trained on compact weights: {note}')
        kept = leaf.size if layout is None else layout.size
        planned[name] = PlannedLeaf(name, leaf.shape, layout, kept, note)
    layouts = {name: leaf.layout for name, leaf in planned.items() if leaf.layout}
    if not layouts:
        reasons = [f'{leaf.name}: {leaf.note}' for leaf in planned.values()]
        listed = '; '.join(reasons[:8])
        raise ValueError(f'no leaf of the model can be trained on compact weights. {listed}')
    plan = BlockPlan(planned)
    return CompactModel(products, plan, layouts, algorithm, scheduler, drop_fraction_fn, rng_seed)
