"""Kernels for NVIDIA's Hopper GPUs, in Mosaic GPU: its copy engine fills buffers while its tensor cores multiply.

A group of threads holds one tile of the result in registers, and goes through the steps that lead to it. Their numbers
are read from memory as they come, so that each copy knows where it begins. A tile without steps is zeros.
"""

import dataclasses
import functools
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
      barriers: say for each pair of buffers when copies into it are done.
    """

    left: Any
    right: Any
    result: Any
    barriers: Any


@dataclasses.dataclass(frozen=True)
class HopperKernels:
    """See `steps.Kernels`."""

    def tile_of(self, rows: int) -> int:
        del rows
        return _TILE

    def product(self, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int) -> jax.Array:
        height, width = blocks.shape[1:]
        count = len(rows)
        numbers = jnp.arange(targets + 1)
        first_steps = jnp.searchsorted(steps.target, numbers).astype(jnp.int32)

        def body(*refs: Any) -> None:
            left, right, first, rows, blocks, result, *memory = refs
            scratch = _Scratch(*memory)
            down = pl.ds(lax.axis_index('tile') * _TILE, _TILE)
            target = lax.axis_index('target')

            def fetch(step: Any, buffer: Any) -> None:
                across = pl.ds(left[step] * height, height)
                barrier = scratch.barriers.at[buffer]
                _copy(rows.at[down, across], scratch.left.at[buffer], barrier)
                _copy(blocks.at[right[step]], scratch.right.at[buffer], barrier)

            def multiply(total: Any, buffer: Any) -> None:
                plgpu.wgmma(total, scratch.left.at[buffer], scratch.right.at[buffer])

            across = pl.ds(target * width, width)
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
            of_rows = pl.ds(left[step] * height, height)
            of_cotangents = pl.ds(target[step] * width, width)

            def fetch(tile: Any, buffer: Any) -> None:
                down = pl.ds(tile * _TILE, _TILE)
                barrier = scratch.barriers.at[buffer]
                _copy(rows.at[down, of_rows], scratch.left.at[buffer], barrier)
                _copy(cotangents.at[down, of_cotangents], scratch.right.at[buffer], barrier)

            def multiply(total: Any, buffer: Any) -> None:
                across = plgpu.transpose_ref(scratch.left.at[buffer], (1, 0))
                plgpu.wgmma(total, across, scratch.right.at[buffer])

            span = jnp.int32(0), jnp.int32(count // _TILE)
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
          body: gets the operands, the result, and what `_Scratch` names.
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
        pl.when(number < end)(functools.partial(fetch, number, buffer))

    for buffer in range(_BUFFERS):
        fetch_within(begin + buffer, buffer)

    def add_up(total: Any) -> jax.Array:
        def add(number: Any, _: None) -> None:
            buffer = lax.rem(number - begin, jnp.int32(_BUFFERS))
            plgpu.barrier_wait(scratch.barriers.at[buffer])
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


def _copy(source: Any, buffer: Any, barrier: Any) -> None:
    plgpu.copy_gmem_to_smem(source, buffer, barrier)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=_transforms(dtype))


def _transforms(dtype: Any) -> tuple[Any, ...]:
    """How tensor cores want shared memory laid out."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE)
