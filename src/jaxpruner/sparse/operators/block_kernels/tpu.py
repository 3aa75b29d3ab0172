"""Kernels for TPUs. The numbers of tiles and blocks are there before a step begins, so its data are copied in time.

Tiles of rows are tall, since each step has a fixed cost. Tiles whose width is a multiple of 128 are cut out of the rows
as they lie. Narrower ones cannot be, so the rows are cut into such tiles beforehand.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpruner.sparse.operators.block_kernels.steps import Steps

_LANES = 128
_SUBLANES = 16  # of 16-bit types; those of 32 bits need half as many
# Of the precisions in JAX's configuration, those in which a TPU rounds float32 to bfloat16.
_ROUNDED = (None, 'default', 'fastest', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class TpuKernels:
    """See `steps.Kernels`.

    Attributes:
      interpret: run the kernels on any device, for tests: `True`, or `pltpu.InterpretParams`.
      largest_tile: rows, a multiple of 16.
      precision: of products of float32, in the derivatives, too.
    """

    interpret: Any = False
    largest_tile: int = 1024
    precision: lax.Precision = lax.Precision.DEFAULT

    @classmethod
    def as_configured(cls) -> 'TpuKernels':
        """Those of JAX's default precision; a kernel has the lowest and the highest."""
        config: Any = jax.config  # its names are made as JAX is loaded
        if config.jax_default_matmul_precision in _ROUNDED:
            return cls()
        return cls(precision=lax.Precision.HIGHEST)

    def tile_of(self, rows: int) -> int:
        tiles = max(-(-rows // self.largest_tile), 1)
        height = max(-(-rows // tiles), 1)
        return -(-height // _SUBLANES) * _SUBLANES

    def product(self, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int) -> jax.Array:
        count = len(rows)
        tile = self.tile_of(count)
        height, width = blocks.shape[1:]
        result = self._call(
            functools.partial(_multiply, precision=self.precision),
            grid=(count // tile, len(steps.left)),
            in_specs=[
                _tiles(tile, height, lambda i, s, left, right, target: (i, left[s])),
                _blocks(blocks.shape[1:], lambda i, s, left, right, target: right[s]),
            ],
            out_specs=_tiles(tile, width, lambda i, s, left, right, target: (i, target[s])),
            out_shape=_tiled_shape(count, targets, width, rows.dtype),
            total=(tile, width),
        )(*steps, _to_tiles(rows, height), blocks)
        return _from_tiles(result)

    def blocks_gradient(
        self, rows: jax.Array, cotangents: jax.Array, steps: Steps, block: tuple[int, int]
    ) -> jax.Array:
        count = len(rows)
        tile = self.tile_of(count)
        height, width = block
        return self._call(
            functools.partial(_differentiate, precision=self.precision),
            grid=(len(steps.left), count // tile),
            in_specs=[
                _tiles(tile, height, lambda s, i, left, right, target: (i, left[s])),
                _tiles(tile, width, lambda s, i, left, right, target: (i, target[s])),
            ],
            out_specs=_blocks(block, lambda s, i, left, right, target: s),
            out_shape=jax.ShapeDtypeStruct((len(steps.left), *block), rows.dtype),
            total=block,
        )(*steps, _to_tiles(rows, height), _to_tiles(cotangents, width))

    def _call(
        self,
        body: Any,
        *,
        grid: tuple[int, int],
        in_specs: list[pl.BlockSpec],
        out_specs: pl.BlockSpec,
        out_shape: jax.ShapeDtypeStruct,
        total: tuple[int, int],
    ) -> Any:
        """The kernel that adds a sum up in `total` over the second axis of the grid."""
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Steps._fields),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(total, jnp.float32)],
        )
        return pl.pallas_call(
            body,
            out_shape=out_shape,
            grid_spec=grid_spec,
            compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
            interpret=self.interpret,
        )


def _multiply(left, right, target, rows, block, result, total, *, precision):
    """One step of `product`; the sum is written when the next step has another target."""
    del left, right
    step, last = pl.program_id(1), pl.num_programs(1) - 1
    before = target[jnp.maximum(step - 1, 0)]
    after = target[jnp.minimum(step + 1, last)]

    @pl.when((step == 0) | (before != target[step]))
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += _dot(rows[...], block[...], 1, precision)

    @pl.when((step == last) | (after != target[step]))
    def _():
        result[...] = total[...].astype(result.dtype)


def _differentiate(left, right, target, rows, cotangents, result, total, *, precision):
    """One tile of rows of `blocks_gradient`."""
    del left, right, target
    tile, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(tile == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += _dot(rows[...], cotangents[...], 0, precision)

    @pl.when(tile == last)
    def _():
        result[...] = total[...].astype(result.dtype)


def _dot(left: jax.Array, right: jax.Array, left_axis: int, precision: lax.Precision) -> jax.Array:
    if left.dtype != jnp.float32:
        precision = lax.Precision.DEFAULT
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _blocks(block: tuple[int, ...], number: Any) -> pl.BlockSpec:
    """One of the blocks `[blocks, in, out]`."""
    return pl.BlockSpec((None, *block), lambda *places: (number(*places), 0, 0))


def _tiles(tile: int, width: int, place: Any) -> pl.BlockSpec:
    """One tile of rows; `place` gives its number down and across."""
    if width % _LANES == 0:
        return pl.BlockSpec((tile, width), place)

    def apart(*places: Any) -> Any:
        down, across = place(*places)
        return across, down, 0

    return pl.BlockSpec((None, tile, width), apart)


def _tiled_shape(count: int, tiles: int, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
    shape = (count, tiles * width) if width % _LANES == 0 else (tiles, count, width)
    return jax.ShapeDtypeStruct(shape, dtype)


def _to_tiles(rows: jax.Array, width: int) -> jax.Array:
    """Rows as `_tiles` cuts them: `[n, columns]`, or `[tiles, n, width]`."""
    if width % _LANES == 0:
        return rows
    return jnp.moveaxis(rows.reshape(len(rows), -1, width), 1, 0)


def _from_tiles(tiles: jax.Array) -> jax.Array:
    if tiles.ndim == 2:
        return tiles
    return jnp.moveaxis(tiles, 0, 1).reshape(tiles.shape[1], -1)
