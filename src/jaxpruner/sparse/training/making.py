"""Makes a model that is trained on compact weights: `block_sparse`, `unstructured_sparse`."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxpruner import (
    caller_warnings,
    checks,
    seeds,
    selection,
    sparsity_distributions,
    sparsity_schedules,
)
from jaxpruner import tree as tree_lib
from jaxpruner.sparse import csr_matrix
from jaxpruner.sparse.block_matrix import BlockShape
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training.compact_model import (
    ALGORITHMS,
    BlockPlan,
    CompactModel,
    PlannedLeaf,
    drawn_positions,
)
from jaxpruner.sparse.training.layouts import Layout

Sparsities = float | Mapping[Any, float | None]

# A group keeps whole blocks, and at least one. A leaf has a surplus if it keeps more than this factor times the weights
# that were asked for.
_MOST_KEPT = 1.5
_MOST_LISTED = 8


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
      sparsity: the share of the weights of each leaf that is not stored, below 1; for all matrices that a block fits
        into, or by name or glob. Leaves that no name matches stay dense, and so do convolutions.
      block: inputs and outputs of a block. Where a block does not divide an axis, the last one is padded. Padding is
        never trained, counted or unpacked.
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
    products = Products(apply_fn, params, *sample)
    layout_of = functools.partial(_layout_of_blocks, block=block, rank=low_rank)
    moves = algorithm, scheduler, drop_fraction_fn, rng_seed
    model = _made(products, layout_of, sparsity, *moves)
    leaves = [model.plan.leaves[name] for name in model.layouts]
    notes = [f'{leaf.name}: {leaf.note}' for leaf in leaves if leaf.note]
    if notes:
        caller_warnings.warn(f'block_sparse: blocks that do not suit: {"; ".join(notes)}')
    return model


def _layout_of_blocks(
    matrix_leaf: MatrixLeaf, sparsity: float, block: BlockShape, rank: int
) -> tuple[Layout | None, str]:
    if sparsity == 1:
        raise ValueError('sparsity must be below 1, since each group of outputs keeps a block')
    inputs, outputs, (height, width) = matrix_leaf.inputs, matrix_leaf.outputs, block
    if height > inputs or width > outputs:
        return None, (
            f'a matrix of {inputs} inputs and {outputs} outputs is smaller than a block of {height} x {width}'
        )
    of_rank = (inputs + outputs) / (inputs * outputs)  # weights of a rank, as a share
    share = 1 - sparsity - rank * of_rank
    if rank and share <= 0:
        return None, (
            f'a term of rank {rank} has more weights than sparsity {sparsity} leaves of {inputs} x {outputs}; the rank '
            f'can be at most {math.ceil((1 - sparsity) / of_rank) - 1}'
        )
    of_inputs = -(-inputs // height)  # blocks in a group
    kept = min(max(1, round(share * of_inputs)), of_inputs)
    layout = Layout(matrix_leaf.layers, inputs, outputs, kept, (height, width), rank)
    kept_share, notes = kept / of_inputs + rank * of_rank, []
    if kept_share > _MOST_KEPT * (1 - sparsity):
        notes.append(f'{kept_share:.0%} are kept: take blocks of fewer inputs')
    coverage = layout.groups * kept / of_inputs
    if coverage < 1 and not rank:  # a term of low rank reaches all inputs
        most = max(1, outputs * kept // of_inputs)
        notes.append(f'reach {coverage:.0%} of the inputs: blocks of {most} outputs reach all')
    return layout, ', '.join(notes)


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
    products = Products(apply_fn, params, *sample)
    moves = algorithm, scheduler, drop_fraction_fn, rng_seed
    return _made(products, _layout_of_weights, sparsity, *moves)


def _layout_of_weights(matrix_leaf: MatrixLeaf, sparsity: float) -> tuple[Layout, str]:
    missing = csr_matrix.why_missing(matrix_leaf.computed_dtype)
    if missing:
        raise NotImplementedError(f'{matrix_leaf.name} cannot be trained in CSR: {missing}')
    inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
    kept = selection.number_to_keep_on_host(inputs * outputs, sparsity)
    return Layout(matrix_leaf.layers, inputs, outputs, kept), ''


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
    rules = sparsity if isinstance(sparsity, Mapping) else {'*': sparsity}
    for rule, value in rules.items():
        if value is not None:
            sparsity_distributions.check_sparsity(value, f'sparsity[{rule!r}]')
    scheduler = scheduler or sparsity_schedules.NoUpdateSchedule()
    _check_moves(algorithm, scheduler, drop_fraction_fn, rng_seed)
    numbers = tree_lib.first_matches(list(rules), list(products.paths.values()), 'sparsity')
    layouts: dict[str, Layout] = {}
    notes: dict[str, str] = {}
    for (name, path), number in zip(products.paths.items(), numbers, strict=True):
        own_sparsity = None if number is None else list(rules.values())[number]
        layout = None
        if name in products.refused:
            note = products.refused[name]
        elif not own_sparsity:
            note = 'its sparsity is 0' if own_sparsity == 0 else 'it has no sparsity'
        elif products.by_leaf[name].op == 'conv':
            note = 'it is a convolution; those are trained dense, or under masks'
        else:
            layout, note = layout_of(products.by_leaf[name], own_sparsity)
        if layout is not None:
            layouts[name] = layout
        elif own_sparsity and (name in rules or path in rules):
            raise ValueError(f'{name!r} cannot be trained on compact weights: {note}')
        notes[name] = note
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


def _check_moves(
    algorithm: str,
    scheduler: sparsity_schedules.BaseSchedule,
    drop_fraction_fn: Callable[[Any], Any],
    rng_seed: Any,
) -> None:
    """Refuses an unknown algorithm, a schedule whose sparsity changes, a fraction outside [0, 1], and no seed."""
    if algorithm not in ALGORITHMS:
        near = tree_lib.nearest(str(algorithm), ALGORITHMS)
        raise ValueError(f'algorithm {algorithm!r} does not train compact weights; {near}')
    target = 0.5
    if any(float(scheduler.get_sparsity_at_step(target, step)) != target for step in (0, 1, 1000)):
        raise ValueError(
            f'scheduler: {type(scheduler).__name__} changes the number of weights, and compact arrays keep their size; '
            'use PeriodicSchedule or StepsSchedule'
        )
    seeds.check_seed(rng_seed)
    checks.check_drop_fraction(drop_fraction_fn(0), 'drop_fraction_fn(0)')
