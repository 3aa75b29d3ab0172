"""Makes a model that is trained on blocks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from jaxpruner import caller_warnings, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.program.models import Products, find_products
from jaxpruner.sparse.training.choosing import BlockSettings, Choice, choose_layouts
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.sparse.training.models import BlockSparse, balanced_positions
from jaxpruner.sparse.training.moving import MoveSettings
from jaxpruner.sparse.training.only_setting import Names
from jaxpruner.sparse.training.plans import BlockPlan, PlannedLeaf


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
    rng_seed: int = 8,
) -> BlockSparse:
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

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> model = block_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.75, block=(4, 8))
    >>> print(model.plan)
    leaf    shape  blocks, or why it stays dense   kept   of
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
    settings = BlockSettings(sparsity, block, only, low_rank)
    schedule = sparsity_schedules.NoUpdateSchedule() if scheduler is None else scheduler
    moves = MoveSettings(algorithm, schedule, drop_fraction_fn, rng_seed)
    products = find_products(apply_fn, params, *sample)
    choice = choose_layouts(products, settings)
    plan = _plan(products, choice, moves)
    model = BlockSparse(products, plan, moves, choice.layouts)
    _warn_of_unreached_inputs(choice.layouts)
    _warn_of_surplus(choice)
    return model


def _plan(products: Products, choice: Choice, moves: MoveSettings) -> BlockPlan:
    topology = balanced_positions(choice.layouts, moves)
    planned = {}
    paths, shapes, _ = tree_lib.flatten_with_paths(products.params)
    for path, shape in zip(paths, shapes, strict=True):
        name = tree_lib.path_string(path)
        layout = choice.layouts.get(name)
        if layout is None:
            kept = shape.size
            note = choice.reasons[name]
        else:
            kept = layout.kept(topology[name])
            note = _note(layout, moves)
        planned[name] = PlannedLeaf(name, shape.shape, layout, kept, note)
    return BlockPlan(planned)


def _note(layout: Layout, moves: MoveSettings) -> str:
    notes = []
    if moves.ever_moves and layout.blocks == 1:
        notes.append('the block of each group stays')
    if layout.input_coverage < 1:
        notes.append(f'reach {np.floor(100 * layout.input_coverage):.0f} % of the inputs')
    return ', '.join(notes)


def _warn_of_unreached_inputs(layouts: Mapping[str, Layout]) -> None:
    """A model that does not see some of its inputs learns less. With RigL, gradients decide which inputs it sees."""
    unreached = []
    for name, layout in layouts.items():
        if layout.input_coverage < 1:
            outputs = max(1, layout.outputs * layout.blocks // layout.candidates)
            unreached.append(
                f'{name} ({100 * layout.input_coverage:.0f} %; blocks of at most {outputs} outputs reach all)'
            )
    if unreached:
        caller_warnings.warn(
            f'block_sparse: blocks cannot reach all inputs of {"; ".join(unreached)}. Take narrower blocks, or a term '
            'of low rank, which reaches all'
        )


def _warn_of_surplus(choice: Choice) -> None:
    surplus = []
    for name in choice.surplus:
        layout = choice.layouts[name]
        surplus.append(
            f'{name} ({100 * layout.kept_share:.0f} %: {layout.blocks} of {layout.candidates} blocks in each group)'
        )
    if surplus:
        caller_warnings.warn(
            'block_sparse: blocks are too coarse for the sparsity, so that more weights are kept of '
            f'{"; ".join(surplus)}. Take blocks of fewer inputs'
        )
