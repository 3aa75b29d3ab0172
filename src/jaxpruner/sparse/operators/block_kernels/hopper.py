"""Kernels for NVIDIA's Hopper GPUs, in Mosaic GPU: its copy engine fills buffers while its tensor cores multiply.

A group of threads holds one tile of the result in registers, and goes through the steps that lead to it. Before each
step it reads from memory where the tile of rows and the block begin. A tile without steps is zeros.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpruner.sparse.operators.block_kernels.steps import Steps

_TILE = 128  # rows
_BUFFERS = 2
_SWIZZLE = 128  # bytes, the width of what tensor cores read from shared memory at once


class _Scratch(NamedTuple):
    """Memory of a group of threads, as the kernel asks for it.

    Attributes:
      left: buffers for tiles of rows.
      right: buffers for what they are multiplied by.
      result: where the sum is put before it is copied.
      barriers: for each pair of buffers, says when copies into it are done.
    """

    left: Any
    right: Any
    result: Any
    barriers: Any

    def buffers(self, number: Any) -> '_Buffers':
        """The pair of buffers of a number."""
        return _Buffers(
            left=self.left.at[number],
            right=self.right.at[number],
            barrier=self.barriers.at[number],
        )


class _Buffers(NamedTuple):
    """A pair of buffers, and the barrier that says when copies into them are done."""

    left: Any
    right: Any
    barrier: Any

    def copy_left(self, source: Any) -> None:
        """Begins to copy a tile of rows."""
        plgpu.copy_gmem_to_smem(source, self.left, self.barrier)

    def copy_right(self, source: Any) -> None:
        """Begins to copy what the rows are multiplied by."""
        plgpu.copy_gmem_to_smem(source, self.right, self.barrier)


@dataclasses.dataclass(frozen=True)
class HopperKernels:
    """See `steps.Kernels`."""

    def tile_of(self, rows: int) -> int:
        del rows
        return _TILE

    def product(self, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int) -> jax.Array:
        _, height, width = blocks.shape
        count = len(rows)
        numbers = jnp.arange(targets + 1)
        first_steps = jnp.searchsorted(steps.target, numbers)
        first_steps = first_steps.astype(jnp.int32)

        def body(*refs: Any) -> None:
            left, right, first, rows, blocks, result, *memory = refs
            scratch = _Scratch(*memory)
            down = _part(lax.axis_index('tile'), _TILE)
            target = lax.axis_index('target')

            def fetch(step: Any, buffer: Any) -> None:
                across = _part(left[step], height)
                buffers = scratch.buffers(buffer)
                buffers.copy_left(rows.at[down, across])
                buffers.copy_right(blocks.at[right[step]])

            def multiply(total: Any, buffer: Any) -> None:
                buffers = scratch.buffers(buffer)
                plgpu.wgmma(total, buffers.left, buffers.right)

            across = _part(target, width)
            span = first[target], first[target + 1]
            _accumulate(span, fetch, multiply, scratch, result.at[down, across])

        kernel = self._kernel(
            body,
            result=jax.ShapeDtypeStruct((count, targets * width), rows.dtype),
            grid={'tile': count // _TILE, 'target': targets},
            shapes=((_TILE, height), (height, width), (_TILE, width)),
        )
        return kernel(steps.left, steps.right, first_steps, rows, blocks)

    def blocks_gradient(
        self, rows: jax.Array, cotangents: jax.Array, steps: Steps, block: tuple[int, int]
    ) -> jax.Array:
        height, width = block
        count = len(rows)
        number = len(steps.left)

        def body(*refs: Any) -> None:
            left, target, rows, cotangents, result, *memory = refs
            scratch = _Scratch(*memory)
            step = lax.axis_index('step')
            of_rows = _part(left[step], height)
            of_cotangents = _part(target[step], width)

            def fetch(tile: Any, buffer: Any) -> None:
                down = _part(tile, _TILE)
                buffers = scratch.buffers(buffer)
                buffers.copy_left(rows.at[down, of_rows])
                buffers.copy_right(cotangents.at[down, of_cotangents])

            def multiply(total: Any, buffer: Any) -> None:
                buffers = scratch.buffers(buffer)
                transposed = buffers.left.transpose((1, 0))
                plgpu.wgmma(total, transposed, buffers.right)

            tiles = count // _TILE
            span = jnp.int32(0), jnp.int32(tiles)
            _accumulate(span, fetch, multiply, scratch, result.at[step])

        kernel = self._kernel(
            body,
            result=jax.ShapeDtypeStruct((number, *block), rows.dtype),
            grid={'step': number},
            shapes=((_TILE, height), (_TILE, width), block),
        )
        return kernel(steps.left, steps.target, rows, cotangents)

    def _kernel(
        self,
        body: Callable[..., None],
        *,
        result: jax.ShapeDtypeStruct,
        grid: dict[str, int],
        shapes: tuple[tuple[int, ...], ...],
    ) -> Any:
        """The kernel with its scratch memory.

        Args:
          body: gets the operands, the result, and the fields of `_Scratch`.
          result: its shape.
          grid: name of an axis -> how many places it has.
          shapes: of a tile of rows, of what it is multiplied by, and of the part of the result.
        """
        left, right, part = shapes
        dtype = result.dtype
        scratch = _Scratch(
            _shared((_BUFFERS, *left), dtype),
            _shared((_BUFFERS, *right), dtype),
            _shared(part, dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=_BUFFERS),
        )
        return plgpu.kernel(
            body,
            out_type=result,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            scratch_types=list(scratch),
        )


def _accumulate(
    span: tuple[Any, Any],
    fetch: Callable[[Any, Any], None],
    multiply: Callable[[Any, Any], None],
    scratch: _Scratch,
    result: Any,
) -> None:
    """Adds products up from the first number of the span to the last, and writes the sum."""
    begin, end = span

    def fetch_within(number: Any, buffer: Any) -> None:
        @pl.when(number < end)
        def _():
            fetch(number, buffer)

    for buffer in range(_BUFFERS):
        fetch_within(begin + buffer, buffer)

    def add_up(total: Any) -> jax.Array:
        def add(number: Any, _: None) -> None:
            buffer = lax.rem(number - begin, jnp.int32(_BUFFERS))
            barrier = scratch.barriers.at[buffer]
            plgpu.barrier_wait(barrier)
            multiply(total, buffer)
            plgpu.wgmma_wait(0)
            # The buffer is free again.
            fetch_within(number + _BUFFERS, buffer)

        lax.fori_loop(begin, end, add, None)
        return total[...]

    accumulator = plgpu.WGMMAAccumulatorRef(scratch.result.shape, jnp.float32)
    total = pl.run_scoped(add_up, accumulator)
    scratch.result[...] = total.astype(scratch.result.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.result, result)
    plgpu.wait_smem_to_gmem(0)


def _part(number: Any, length: int) -> Any:
    """One of the equal parts of an axis."""
    return pl.ds(number * length, length)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that tensor cores read."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(_SWIZZLE)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
