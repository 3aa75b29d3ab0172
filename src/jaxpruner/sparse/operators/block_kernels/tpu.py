"""Kernels for TPUs. A kernel gets the numbers of all tiles and blocks before it begins, and so copies data in time.

Tiles of rows are tall, since each step has a fixed cost. A tile whose width is a multiple of 128 is cut out of the rows
in place. Narrower tiles cannot be cut so: the rows are cut into them beforehand.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
      precision: of products of float32, also in the derivatives.
    """

    interpret: Any = False
    largest_tile: int = 1024
    precision: lax.Precision = lax.Precision.DEFAULT

    @classmethod
    def as_configured(cls) -> 'TpuKernels':
        """The kernels for JAX's default precision: a kernel has only the lowest and the highest."""
        config: Any = jax.config  # its names are made as JAX is loaded
        if config.jax_default_matmul_precision in _ROUNDED:
            return cls()
        return cls(precision=lax.Precision.HIGHEST)

    def tile_of(self, rows: int) -> int:
        tiles = max(-(-rows // self.largest_tile), 1)
        height = max(-(-rows // tiles), 1)
        sublanes = -(-height // _SUBLANES)
        return sublanes * _SUBLANES

    def product(self, rows: jax.Array, blocks: jax.Array, steps: Steps, targets: int) -> jax.Array:
        count = len(rows)
        tile = self.tile_of(count)
        _, height, width = blocks.shape
        block = height, width

        def left(tile: Any, step: Any, steps: Steps) -> Any:
            return tile, steps.left[step]

        def right(tile: Any, step: Any, steps: Steps) -> Any:
            del tile
            return steps.right[step]

        def target(tile: Any, step: Any, steps: Steps) -> Any:
            return tile, steps.target[step]

        kernel = self._kernel(
            _multiply,
            grid=(count // tile, len(steps.left)),
            in_specs=[_tiles(tile, height, left), _blocks(block, right)],
            out_specs=_tiles(tile, width, target),
            out_shape=_tiled_shape(count, targets, width, rows.dtype),
            total=(tile, width),
        )
        tiles = _to_tiles(rows, height)
        result = kernel(*steps, tiles, blocks)
        return _from_tiles(result)

    def blocks_gradient(
        self, rows: jax.Array, cotangents: jax.Array, steps: Steps, block: tuple[int, int]
    ) -> jax.Array:
        number = len(steps.left)
        count = len(rows)
        tile = self.tile_of(count)
        height, width = block

        def left(step: Any, tile: Any, steps: Steps) -> Any:
            return tile, steps.left[step]

        def target(step: Any, tile: Any, steps: Steps) -> Any:
            return tile, steps.target[step]

        def result(step: Any, tile: Any, steps: Steps) -> Any:
            del tile, steps
            return step

        kernel = self._kernel(
            _differentiate,
            grid=(number, count // tile),
            in_specs=[_tiles(tile, height, left), _tiles(tile, width, target)],
            out_specs=_blocks(block, result),
            out_shape=jax.ShapeDtypeStruct((number, *block), rows.dtype),
            total=block,
        )
        of_rows = _to_tiles(rows, height)
        of_cotangents = _to_tiles(cotangents, width)
        return kernel(*steps, of_rows, of_cotangents)

    def _kernel(
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
        compiler_params = pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'))

        def run(*refs: Any) -> None:
            record = _Refs.of(refs)
            body(record, self.precision)

        return pl.pallas_call(
            run,
            out_shape=out_shape,
            grid_spec=grid_spec,
            compiler_params=compiler_params,
            interpret=self.interpret,
        )


class _Refs(NamedTuple):
    """What a kernel gets for one place of its grid.

    Attributes:
      steps: numbers of tiles and blocks.
      left: a tile of rows.
      right: what it is multiplied by.
      result: the part of the result.
      total: the sum so far, in float32.
    """

    steps: Steps
    left: Any
    right: Any
    result: Any
    total: Any

    @classmethod
    def of(cls, refs: Sequence[Any]) -> '_Refs':
        """Makes it of references in the kernel's order: the steps stand first."""
        number = len(Steps._fields)
        steps = Steps(*refs[:number])
        return cls(steps, *refs[number:])

    def product(self, left_axis: int, precision: lax.Precision) -> jax.Array:
        """Multiplies left and right, and adds up along an axis of left and the first of right, in float32."""
        left = self.left[...]
        right = self.right[...]
        if left.dtype != jnp.float32:
            precision = lax.Precision.DEFAULT
        contracted = (left_axis,), (0,)
        no_batch = (), ()
        return lax.dot_general(
            left,
            right,
            (contracted, no_batch),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def add(self, product: jax.Array, is_first: Any, is_last: Any) -> None:
        """Adds a product to the sum, and writes the sum if the product is the last."""

        @pl.when(is_first)
        def _():
            self.total[...] = jnp.zeros_like(self.total)

        self.total[...] += product

        @pl.when(is_last)
        def _():
            total = self.total[...]
            self.result[...] = total.astype(self.result.dtype)


def _multiply(refs: _Refs, precision: lax.Precision) -> None:
    """One step of `product`; the sum is written when the next step has another target."""
    step = pl.program_id(1)
    last = pl.num_programs(1) - 1
    targets = refs.steps.target
    before = targets[jnp.maximum(step - 1, 0)]
    after = targets[jnp.minimum(step + 1, last)]
    is_first = (step == 0) | (before != targets[step])
    is_last = (step == last) | (after != targets[step])
    product = refs.product(1, precision)
    refs.add(product, is_first, is_last)


def _differentiate(refs: _Refs, precision: lax.Precision) -> None:
    """One tile of rows of `blocks_gradient`."""
    tile = pl.program_id(1)
    last = pl.num_programs(1) - 1
    product = refs.product(0, precision)
    refs.add(product, tile == 0, tile == last)


# An index says which parts of arrays one place of the grid needs. The grid of `product` goes over tiles of rows, and
# within each over steps. With 2 tiles and steps `left 1 0, right 0 1, target 0 1` it is
#
#     place of the grid    rows (down, across)    blocks    result (down, across)
#     tile 0, step 0       0, left[0] = 1         0         0, target[0] = 0
#     tile 0, step 1       0, left[1] = 0         1         0, target[1] = 1
#     tile 1, step 0       1, 1                   0         1, 0
#     tile 1, step 1       1, 0                   1         1, 1
#
# An index gives a column of this table. Its arguments are the two numbers of a place, in the order of the grid, and the
# steps.
_Index = Callable[[Any, Any, Steps], Any]


def _blocks(block: tuple[int, ...], index: _Index) -> pl.BlockSpec:
    """One of the blocks `[blocks, in, out]`; `index` gives its number."""

    def index_map(first: Any, second: Any, *steps: Any) -> Any:
        number = index(first, second, Steps(*steps))
        return number, 0, 0

    return pl.BlockSpec((None, *block), index_map)


def _tiles(tile: int, width: int, index: _Index) -> pl.BlockSpec:
    """One tile of rows; `index` gives its number down and across."""
    is_cut = _is_cut_beforehand(width)

    def index_map(first: Any, second: Any, *steps: Any) -> Any:
        down, across = index(first, second, Steps(*steps))
        return (across, down, 0) if is_cut else (down, across)

    shape = (None, tile, width) if is_cut else (tile, width)
    return pl.BlockSpec(shape, index_map)


def _is_cut_beforehand(width: int) -> bool:
    """Whether tiles are so narrow that the rows are cut into them before the kernel runs."""
    return width % _LANES != 0


def _tiled_shape(count: int, tiles: int, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of rows that `_from_tiles` takes."""
    shape = count, tiles * width
    if _is_cut_beforehand(width):
        shape = tiles, count, width
    return jax.ShapeDtypeStruct(shape, dtype)


def _to_tiles(rows: jax.Array, width: int) -> jax.Array:
    """Rows as `_tiles` cuts them: `[n, columns]`, or `[tiles, n, width]`."""
    if not _is_cut_beforehand(width):
        return rows
    count = len(rows)
    by_row = rows.reshape(count, -1, width)
    return jnp.moveaxis(by_row, 1, 0)


def _from_tiles(tiles: jax.Array) -> jax.Array:
    """Rows `[n, columns]` again."""
    if tiles.ndim == 2:
        return tiles
    by_row = jnp.moveaxis(tiles, 0, 1)
    count = len(by_row)
    return by_row.reshape(count, -1)
