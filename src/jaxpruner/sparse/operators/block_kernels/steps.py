"""The two products that the forward pass and the derivatives are made of, as a list of steps.

A block-sparse matrix, its transpose, and several matrices side by side differ only in which block meets which tile of
rows. That is data: step `s` multiplies the tile of rows `left[s]` by the block `right[s]`, and adds the product to the
tile of the result `target[s]`. Take the matrix of 6 inputs and 4 outputs in blocks of 2 x 2, one for each group, with
`indices = [[1], [0]]`. It takes two steps forward, and the same two for the derivative of its inputs:

    forward      left 1 0   right 0 1   target 0 1
    transposed   left 1 0   right 1 0   target 0 1

Targets ascend, so that a kernel adds up one tile after the other in fast memory.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import custom_batching


class Steps(NamedTuple):
    """Which tile of rows meets which block; all int32[steps].

    Attributes:
      left: tiles of the rows.
      right: blocks.
      target: tiles of the result, ascending.
    """

    left: jax.Array
    right: jax.Array
    target: jax.Array


class Kernels(Protocol):
    """What the kernels for a device provide; they know nothing of padding and `vmap`."""

    def tile_of(self, rows: int) -> int:
        """The number of rows of a tile; kernels get a multiple of it."""
        ...

    def product(self, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int) -> jax.Array:
        """Returns `[n, targets * out]`; tiles that are the target of no step may hold anything.

        Args:
          rows: `[n, lefts * in]`.
          blocks: `[rights, in, out]`.
          steps: at least one.
          targets: how many tiles the result has.
        """
        ...

    def blocks_gradient(
        self, rows: jax.Array, cotangents: jax.Array, steps: Steps, block: tuple[int, int]
    ) -> jax.Array:
        """Returns `[steps, in, out]`: the derivative of the block of each step. `right` is not read.

        Args:
          rows: `[n, lefts * in]`.
          cotangents: `[n, targets * out]`.
          steps: at least one.
          block: `in` and `out`.
        """
        ...


def forward_steps(indices: jax.Array) -> Steps:
    """The steps of a product with blocks at `indices` int32[groups, blocks]."""
    groups, blocks = indices.shape
    numbers = jnp.arange(groups, dtype=jnp.int32)
    return Steps(
        left=indices.reshape(-1).astype(jnp.int32),
        right=jnp.arange(indices.size, dtype=jnp.int32),
        target=jnp.repeat(numbers, blocks),
    )


def transposed_steps(steps: Steps) -> Steps:
    """The steps of a product with the transposed matrix, which has the same blocks."""
    order = jnp.argsort(steps.left)
    return Steps(
        left=steps.target[order],
        right=steps.right[order],
        target=steps.left[order],
    )


def product(
    kernels: Kernels,
    rows: jax.Array,
    blocks: jax.Array,
    steps: Steps,
    targets: int,
) -> jax.Array:
    """`Kernels.product` for any number of rows; under `vmap` it is one call of the kernel.

    The rule for `vmap` calls this function again, so it also holds for a `vmap` of a `vmap`.
    """

    @custom_batching.custom_vmap
    def run(rows: jax.Array, blocks: jax.Array, steps: Steps) -> jax.Array:
        padded = _padded_rows(kernels, rows)
        result = kernels.product(padded, blocks, steps, targets)
        return result[: len(rows)]

    @run.def_vmap
    def run_batched(size: int, is_batched: Any, rows: jax.Array, blocks: jax.Array, steps: Steps):
        _, blocks_batched, steps_batched = is_batched
        if blocks_batched or any(steps_batched):
            members = _Members(size, *is_batched)
            result = _product_of_own_matrices(kernels, members, rows, blocks, steps, targets)
        else:
            result = _product_of_one_matrix(kernels, rows, blocks, steps, targets)
        return result, True

    return run(rows, blocks, steps)


class _Members(NamedTuple):
    """A batch, as `vmap` describes it.

    Attributes:
      size: how many members it has.
      rows: whether each member has rows of its own, along a first axis.
      blocks: whether each has blocks of its own.
      steps: for each array of the steps, whether each member has its own.
    """

    size: int
    rows: bool
    blocks: bool
    steps: Any


def _product_of_one_matrix(
    kernels: Kernels, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int
) -> jax.Array:
    """All members `[size, n, columns]` meet the same matrix: their rows are multiplied at once."""
    size, _, columns = rows.shape
    merged = rows.reshape(-1, columns)
    result = product(kernels, merged, blocks, steps, targets)
    return result.reshape(size, -1, result.shape[-1])


def _product_of_own_matrices(
    kernels: Kernels,
    members: _Members,
    rows: jax.Array,
    blocks: jax.Array,
    steps: Steps,
    targets: int,
) -> jax.Array:
    """Each member meets its own matrix: the matrices make one larger matrix, with their results side by side."""
    lefts = rights = 0
    if members.rows:
        lefts = rows.shape[-1] // blocks.shape[-2]
        rows = _columns_side_by_side(rows)
    if members.blocks:
        _, rights, *block = blocks.shape
        blocks = blocks.reshape(-1, *block)
    counts = lefts, rights, targets
    of_all = _side_by_side(members.size, members.steps, steps, counts)
    result = product(kernels, rows, blocks, of_all, members.size * targets)
    return _columns_apart(result, members.size)


def blocks_gradient(
    kernels: Kernels,
    rows: jax.Array,
    cotangents: jax.Array,
    steps: Steps,
    block: tuple[int, int],
) -> jax.Array:
    """`Kernels.blocks_gradient` for any number of rows; under `vmap` it is one call of the kernel."""

    @custom_batching.custom_vmap
    def run(rows: jax.Array, cotangents: jax.Array, steps: Steps) -> jax.Array:
        rows = _padded_rows(kernels, rows)
        cotangents = _padded_rows(kernels, cotangents)
        return kernels.blocks_gradient(rows, cotangents, steps, block)

    @run.def_vmap
    def run_batched(
        size: int, is_batched: Any, rows: jax.Array, cotangents: jax.Array, steps: Steps
    ):
        rows_batched, cotangents_batched, steps_batched = is_batched
        height, width = block
        lefts = targets = 0
        if rows_batched:
            lefts = rows.shape[-1] // height
            rows = _columns_side_by_side(rows)
        if cotangents_batched:
            targets = cotangents.shape[-1] // width
            cotangents = _columns_side_by_side(cotangents)
        counts = lefts, 0, targets
        of_all = _side_by_side(size, steps_batched, steps, counts)
        result = blocks_gradient(kernels, rows, cotangents, of_all, block)
        return result.reshape(size, -1, *block), True

    return run(rows, cotangents, steps)


def _side_by_side(size: int, is_batched: Any, steps: Steps, counts: tuple[int, int, int]) -> Steps:
    """The steps of all members of a batch, in one list.

    `counts` says how many tiles of rows, blocks and tiles of the result each member has of its own, or 0 if members
    share them. With `counts = (3, 0, 2)` a step of the second member that was `left 1, right 5, target 0` becomes
    `left 3 + 1, right 5, target 2 + 0`.
    """
    members = jnp.arange(size, dtype=jnp.int32)

    def number(steps: jax.Array, is_batched: bool, count: int) -> jax.Array:
        if not is_batched:
            steps = jnp.broadcast_to(steps, (size, *steps.shape))
        offsets = count * members
        numbered = steps + offsets[:, None]
        return numbered.reshape(-1)

    return Steps._make(map(number, steps, is_batched, counts))


def _columns_side_by_side(rows: jax.Array) -> jax.Array:
    """`[size, n, columns]` as `[n, size * columns]`."""
    size, count, columns = rows.shape
    by_row = jnp.moveaxis(rows, 0, 1)
    return by_row.reshape(count, size * columns)


def _columns_apart(rows: jax.Array, size: int) -> jax.Array:
    """`[n, size * columns]` as `[size, n, columns]`."""
    count, columns = rows.shape
    by_row = rows.reshape(count, size, columns // size)
    return jnp.moveaxis(by_row, 1, 0)


def _padded_rows(kernels: Kernels, rows: jax.Array) -> jax.Array:
    """Adds rows of zeros, so that there are whole tiles, and at least one."""
    count = len(rows)
    tile = kernels.tile_of(count)
    tiles = max(-(-count // tile), 1)
    lacking = tiles * tile - count
    return jnp.pad(rows, ((0, lacking), (0, 0)))
