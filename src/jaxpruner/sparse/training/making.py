"""Makes a model that is trained on compact weights: `block_sparse`, `unstructured_sparse`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from jaxpruner import caller_warnings, selection, sparsity_distributions, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.operators.blocks import BlockShape
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training.compact_model import CompactModel, check_moves, drawn_positions
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.sparse.training.plans import BlockPlan, PlannedLeaf

Names = str | Sequence[str | tree_lib.Path]

# A group keeps whole blocks, and at least one. A leaf has a surplus if it keeps more than this factor times the weights
# that were asked for.
_MOST_KEPT = 1.5
_MOST_LISTED = 8


class NoLayoutError(ValueError):
    """A matrix cannot be stored as was asked; the text is the reason, without the name of the leaf."""


def block_sparse(
    apply_fn: Callable[..., Any],
    params: Any,
    *sample: Any,
    sparsity: float | Mapping[Any, float | None],
    block: BlockShape | Mapping[Any, BlockShape] = (8, 128),
    only: Names | None = None,
    low_rank: int | Mapping[Any, int] = 0,
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
      sparsity: the share of the weights of each leaf that is not stored, below 1; for all leaves, or by name or glob.
      block: inputs and outputs of a block, for all leaves, or by name. Where a block does not divide an axis, the last
        one is padded. Padding is never trained, counted or unpacked.
      only: names or globs of the leaves that are meant; by default all matrices that a block fits into. Convolutions
        stay dense.
      low_rank: rank of a dense term `down @ up` beside the blocks, or by name. Its weights count as kept ones.
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

    Warns if blocks cannot reach all inputs, and if they are too coarse for the sparsity.

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
    for name, value in _by_name(sparsity, 'sparsity').items():
        if value == 1:
            raise ValueError(
                f'{name} must be below 1, since each group of outputs keeps a block, got 1'
            )
    for name, value in _by_name(block, 'block').items():
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        if not is_pair or not all(map(_is_whole_number, value)):
            raise TypeError(f'{name} must be inputs and outputs, such as (8, 128), got {value!r}')
        if min(value) < 1:
            raise ValueError(
                f'{name} must have at least one input and one output, got {tuple(value)}'
            )
    for name, value in _by_name(low_rank, 'low_rank').items():
        if not _is_whole_number(value):
            raise TypeError(f'{name} must be a whole number, got {value!r}')
        if value < 0:
            raise ValueError(f'{name} must not be negative, got {value}; 0 means none')
    unreached, surplus = [], []

    def layout_of(matrix_leaf: MatrixLeaf, sparsity: float) -> tuple[Layout, str]:
        path = matrix_leaf.path
        own_block = block_of(path)
        if own_block is None:
            raise NoLayoutError('no name in block matches it')
        rank, (height, width) = rank_of(path) or 0, own_block
        inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
        if height > inputs or width > outputs:
            raise NoLayoutError(
                f'a matrix of {inputs} inputs and {outputs} outputs is smaller than a block of {height} x {width}'
            )
        of_rank = (inputs + outputs) / (inputs * outputs)  # weights of a rank, as a share
        share = 1 - sparsity - rank * of_rank
        if rank and share <= 0:
            raise NoLayoutError(
                f'a term of rank {rank} has more weights than sparsity {sparsity} leaves of {inputs} x {outputs}; '
                f'the rank can be at most {math.ceil((1 - sparsity) / of_rank) - 1}'
            )
        of_inputs = -(-inputs // height)  # blocks in a group
        kept = min(max(1, round(share * of_inputs)), of_inputs)
        layout = Layout(matrix_leaf.layers, inputs, outputs, kept, (height, width), rank)
        kept_share, notes = kept / of_inputs + rank * of_rank, []
        if kept_share > _MOST_KEPT * (1 - sparsity):
            surplus.append(
                f'{matrix_leaf.name} ({100 * kept_share:.0f} %: {kept} of {of_inputs} blocks in each group)'
            )
        if algorithm != 'static_sparse' and scheduler is not None and kept == 1:
            notes.append('the block of each group stays')
        # A term of low rank reaches all inputs.
        coverage = 1.0 if rank else layout.groups * kept / of_inputs
        if coverage < 1:
            most = max(1, outputs * kept // of_inputs)
            unreached.append(
                f'{matrix_leaf.name} ({100 * coverage:.0f} %; blocks of at most {most} outputs reach all)'
            )
            notes.append(f'reach {np.floor(100 * coverage):.0f} % of the inputs')
        return layout, ', '.join(notes)

    products = Products(apply_fn, params, *sample)
    block_of, rank_of = _lookup(block, products, 'block'), _lookup(low_rank, products, 'low_rank')
    moves = algorithm, scheduler, drop_fraction_fn, rng_seed
    model = _made(products, layout_of, sparsity, only, *moves)
    if unreached:
        caller_warnings.warn(
            f'block_sparse: blocks cannot reach all inputs of {"; ".join(unreached)}. Take narrower blocks, or a term '
            'of low rank, which reaches all'
        )
    if surplus:
        caller_warnings.warn(
            'block_sparse: blocks are too coarse for the sparsity, so that more weights are kept of '
            f'{"; ".join(surplus)}. Take blocks of fewer inputs'
        )
    return model


def unstructured_sparse(
    apply_fn: Callable[..., Any],
    params: Any,
    *sample: Any,
    sparsity: float | Mapping[Any, float | None],
    only: Names | None = None,
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
      sparsity: the share of the weights of each matrix that is not stored, or by name or glob of the leaf.
      only: names or globs of the leaves that are meant; by default all matrices. Convolutions stay dense.
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
    >>> if csr_kernel.why_missing(jnp.float32) is None:
    ...     model = unstructured_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.95)
    ...     weights, topology = model.pack(params)
    ...     assert weights['kernel']['compressed'].shape == (26,)
    """

    def layout_of(matrix_leaf: MatrixLeaf, sparsity: float) -> tuple[Layout, str]:
        missing = csr_kernel.why_missing(matrix_leaf.computed_dtype)
        if missing:
            raise NotImplementedError(f'{matrix_leaf.name} cannot be trained in CSR: {missing}')
        inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
        kept = selection.number_to_keep_on_host(inputs * outputs, sparsity)
        return Layout(matrix_leaf.layers, inputs, outputs, kept), ''

    products = Products(apply_fn, params, *sample)
    moves = algorithm, scheduler, drop_fraction_fn, rng_seed
    return _made(products, layout_of, sparsity, only, *moves)


def _made(
    products: Products,
    layout_of: Callable[[MatrixLeaf, float], tuple[Layout, str]],
    sparsity: Any,
    only: Names | None,
    algorithm: str,
    scheduler: sparsity_schedules.BaseSchedule | None,
    drop_fraction_fn: Callable[[Any], Any],
    rng_seed: Any,
) -> CompactModel:
    """A model in which the leaves that are meant have the layouts of `layout_of`, each with a note for the plan."""
    for name, value in _by_name(sparsity, 'sparsity').items():
        if value is not None:
            sparsity_distributions.check_sparsity(value, name)
    if scheduler is None:
        scheduler = sparsity_schedules.NoUpdateSchedule()
    check_moves(algorithm, scheduler, drop_fraction_fn, rng_seed)
    sparsity_of = _lookup(sparsity, products, 'sparsity')
    names = None if only is None else tree_lib.as_names(only)
    if names is not None:
        _check_only(names, products)
    layouts: dict[str, Layout] = {}
    notes = dict(products.refused)
    for name, matrix_leaf in products.by_leaf.items():
        own_sparsity = sparsity_of(matrix_leaf.path)
        try:
            if names is not None and not tree_lib.matches_any(names, matrix_leaf.path):
                raise NoLayoutError('no name in only matches it')
            if not own_sparsity:
                missing = 'its sparsity is 0' if own_sparsity == 0 else 'it has no sparsity'
                raise NoLayoutError(missing)
            if matrix_leaf.op == 'conv':
                raise NoLayoutError('it is a convolution; those are trained dense, or under masks')
            layouts[name], notes[name] = layout_of(matrix_leaf, own_sparsity)
        except NoLayoutError as error:
            if names is not None and (name in names or matrix_leaf.path in names):
                raise ValueError(
                    f'only: {name!r} cannot be trained on compact weights: {error}'
                ) from error
            notes[name] = str(error)
    if not layouts:
        reasons = [f'{name}: {note}' for name, note in notes.items()]
        raise ValueError(
            'no leaf of the model can be trained on compact weights. '
            + '; '.join(reasons[:_MOST_LISTED])
        )
    positions = drawn_positions(layouts, rng_seed)
    planned = {}
    for name, leaf in products.by_name(products.params).items():
        layout, kept = layouts.get(name), leaf.size
        if layout is not None:
            of_rank = layout.rank * (layout.inputs + layout.outputs)
            kept = int(layout.sizes(positions[name]).sum()) + math.prod(layout.layers) * of_rank
        planned[name] = PlannedLeaf(name, leaf.shape, layout, kept, notes[name])
    plan = BlockPlan(planned)
    return CompactModel(products, plan, layouts, algorithm, scheduler, drop_fraction_fn, rng_seed)


def _check_only(names: Sequence[str | tree_lib.Path], products: Products) -> None:
    """Refuses a name that means no leaf, or only leaves that are no matrices."""
    paths = [matrix_leaf.path for matrix_leaf in products.by_leaf.values()]
    refused = {tuple(leaf.split('/')): reason for leaf, reason in products.refused.items()}
    tree_lib.check_names(names, [*paths, *refused], 'only')
    for name in names:
        if not any(tree_lib.matches(name, path) for path in paths):
            path = next(path for path in refused if tree_lib.matches(name, path))
            raise ValueError(
                f'only: {name!r} cannot be trained on compact weights: {"/".join(path)}: {refused[path]}'
            )


def _by_name(setting: Any, name: str) -> dict[str, Any]:
    """The values of a setting, under the names that messages give them."""
    if not isinstance(setting, Mapping):
        return {name: setting}
    return {f'{name}[{key!r}]': value for key, value in setting.items()}


def _lookup(setting: Any, products: Products, name: str) -> Callable[[tree_lib.Path], Any]:
    """A function from the path of a leaf to its value in a setting; `None` if no name of the setting matches it."""
    if not isinstance(setting, Mapping):
        return lambda path: setting
    paths = [matrix_leaf.path for matrix_leaf in products.by_leaf.values()]
    values = list(setting.values())
    by_path = {}
    for path, number in zip(paths, tree_lib.first_matches(setting, paths, name), strict=True):
        by_path[path] = None if number is None else values[number]
    return by_path.__getitem__


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
