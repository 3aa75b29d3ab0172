"""Kernels for NVIDIA's Hopper GPUs, in Mosaic GPU: its copy engine fills buffers while its tensor cores multiply.

A group of threads holds one tile of the result in registers, and goes through the steps that lead to it. Their numbers
are read from memory as they come, so that each copy knows where it begins. A tile without steps is zeros.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpruner.sparse.operators.block_kernels.steps import Steps

_TILE = 128  # rows
_BUFFERS = 2
_SWIZZLE = 128  # bytes, the width of what tensor cores read from shared memory at once


@dataclasses.dataclass(frozen=True)
class HopperKernels:
    """See `steps.Kernels`."""

    def tile_of(self, rows: int) -> int:
        del rows
        return _TILE

    def product(self, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int) -> jax.Array:
        height, width = blocks.shape[1:]
        count, dtype = len(rows), rows.dtype
        first = jnp.searchsorted(steps.target, jnp.arange(targets + 1)).astype(jnp.int32)

        def body(left, right, first, rows, blocks, result, tiles, operands, staged, barriers):
            down = pl.ds(lax.axis_index('tile') * _TILE, _TILE)
            target = lax.axis_index('target')

            def fetch(step: Any, buffer: Any) -> None:
                across = pl.ds(left[step] * height, height)
                barrier = barriers.at[buffer]
                plgpu.copy_gmem_to_smem(rows.at[down, across], tiles.at[buffer], barrier)
                plgpu.copy_gmem_to_smem(blocks.at[right[step]], operands.at[buffer], barrier)

            def multiply(total: Any, buffer: Any) -> None:
                plgpu.wgmma(total, tiles.at[buffer], operands.at[buffer])

            place = result.at[down, pl.ds(target * width, width)]
            span = first[target], first[target + 1]
            _accumulate(span, fetch, multiply, barriers, staged, place)

        return self._kernel(
            body,
            result=jax.ShapeDtypeStruct((count, targets * width), dtype),
            grid=(count // _TILE, targets),
            grid_names=('tile', 'target'),
            copied=((_TILE, height), (height, width)),
            staged=(_TILE, width),
        )(steps.left, steps.right, first, rows, blocks)

    def blocks_gradient(
        self, rows: jax.Array, cotangents: jax.Array, steps: Steps, block: tuple[int, int]
    ) -> jax.Array:
        height, width = block
        count, dtype = len(rows), rows.dtype

        def body(left, target, rows, cotangents, result, tiles, operands, staged, barriers):
            step = lax.axis_index('step')
            columns = pl.ds(left[step] * height, height), pl.ds(target[step] * width, width)

            def fetch(tile: Any, buffer: Any) -> None:
                down = pl.ds(tile * _TILE, _TILE)
                barrier = barriers.at[buffer]
                plgpu.copy_gmem_to_smem(rows.at[down, columns[0]], tiles.at[buffer], barrier)
                plgpu.copy_gmem_to_smem(
                    cotangents.at[down, columns[1]], operands.at[buffer], barrier
                )

            def multiply(total: Any, buffer: Any) -> None:
                across = plgpu.transpose_ref(tiles.at[buffer], (1, 0))
                plgpu.wgmma(total, across, operands.at[buffer])

            span = jnp.int32(0), jnp.int32(count // _TILE)
            _accumulate(span, fetch, multiply, barriers, staged, result.at[step])

        return self._kernel(
            body,
            result=jax.ShapeDtypeStruct((len(steps.left), *block), dtype),
            grid=(len(steps.left),),
            grid_names=('step',),
            copied=((_TILE, height), (_TILE, width)),
            staged=block,
        )(steps.left, steps.target, rows, cotangents)

    def _kernel(
        self,
        body: Callable[..., None],
        *,
        result: jax.ShapeDtypeStruct,
        grid: tuple[int, ...],
        grid_names: tuple[str, ...],
        copied: tuple[tuple[int, ...], tuple[int, ...]],
        staged: tuple[int, ...],
    ) -> Any:
        """The kernel with buffers for two operands, one for its result, and barriers that say when a copy is done."""
        shared = [
            plgpu.SMEM((_BUFFERS, *shape), result.dtype, transforms=_transforms(result.dtype))
            for shape in copied
        ]
        return plgpu.kernel(
            body,
            out_type=result,
            grid=grid,
            grid_names=grid_names,
            scratch_types=[
                *shared,
                plgpu.SMEM(staged, result.dtype, transforms=_transforms(result.dtype)),
                plgpu.Barrier(num_arrivals=2, num_barriers=_BUFFERS),
            ],
        )


def _accumulate(
    span: tuple[Any, Any],
    fetch: Callable[[Any, Any], None],
    multiply: Callable[[Any, Any], None],
    barriers: Any,
    staged: Any,
    result: Any,
) -> None:
    """Adds products up from the first number of the span to the last, and writes the sum."""
    begin, end = span
    for buffer in range(_BUFFERS):
        pl.when(begin + buffer < end)(functools.partial(fetch, begin + buffer, buffer))

    def add_up(total: Any) -> jax.Array:
        def add(number: Any, _: None) -> None:
            buffer = lax.rem(number - begin, jnp.int32(_BUFFERS))
            plgpu.barrier_wait(barriers.at[buffer])
            multiply(total, buffer)
            plgpu.wgmma_wait(0)
            # The buffer is free again.
            ahead = number + _BUFFERS
            pl.when(ahead < end)(functools.partial(fetch, ahead, buffer))

        lax.fori_loop(begin, end, add, None)
        return total[...]

    total = pl.run_scoped(add_up, plgpu.WGMMAAccumulatorRef(staged.shape, jnp.float32))
    staged[...] = total.astype(staged.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, result)
    plgpu.wait_smem_to_gmem(0)


def _transforms(dtype: Any) -> tuple[Any, ...]:
    """How tensor cores want shared memory laid out."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE)
