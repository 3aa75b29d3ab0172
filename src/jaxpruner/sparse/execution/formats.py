"""How a product can run beside the dense one: a class for each format. Its text is its name in settings and reports.

A format packs matrices `[layers, inputs, outputs]` into a dictionary of arrays with the layers in front. Inside of the
model it makes an operator of these arrays. All layers of a stack have arrays of one length; shorter ones are filled up.

`nonzero` is everywhere bool[layers, inputs, outputs]: which weights are not zero.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import csr_matrix
from jaxpruner.sparse.block_matrix import BlockMatrix, BlockShape
from jaxpruner.sparse.formats.blocks import in_blocks
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.product_sites import Convolution

Arrays = dict[str, np.ndarray]

DENSE = 'dense'  # the product as it is, which has no class
_MOST_WINDOW_BYTES = 1 << 28
# CSR that stores a larger share of the matrix has never been faster, nor a smaller matrix of a larger share.
_LARGEST_SHARE_OF_CSR = 0.3
_LARGEST_SHARE_OF_SMALLER = 0.95
# From wide to narrow outputs: wide blocks multiply faster.
_BLOCK_OUTPUTS = (512, 256, 128, 64, 32)
_BLOCK_INPUTS = (64, 32, 16, 8, 4, 2, 1)
# Blocks are measured if their estimated cost is below this, in products of the dense matrix.
_LARGEST_COST = 0.85
_MEASURED_SHAPES = 3


@dataclasses.dataclass(frozen=True)
class Csr:
    """Single weights, in CSR."""

    def __str__(self) -> str:
        return 'csr'

    def why_not(self, leaf: MatrixLeaf) -> str | None:
        """Why it cannot run a leaf; `None` if it can."""
        if leaf.inputs * leaf.outputs > np.iinfo(np.int32).max:
            return 'its positions need more than 32 bits'
        return csr_matrix.why_missing(leaf.computed_dtype) or _too_large_windows(leaf)

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        transposed = matrices.swapaxes(1, 2).reshape(len(matrices), -1)
        weights = _largest(np.count_nonzero(transposed, axis=1))
        # Numbers that fill a layer up stand behind its last row, and are never read.
        compressed = np.zeros((len(matrices), weights), matrices.dtype)
        positions = np.full((len(matrices), weights), leaf.inputs * leaf.outputs, np.int32)
        row_offsets = np.zeros((len(matrices), leaf.outputs + 1), np.int32)
        first_of_rows = leaf.inputs * np.arange(leaf.outputs + 1)
        for layer, matrix in enumerate(transposed):
            places = np.flatnonzero(matrix)
            compressed[layer, : len(places)] = matrix[places]
            positions[layer, : len(places)] = places
            row_offsets[layer] = np.searchsorted(places, first_of_rows)
        return {'compressed': compressed, 'positions': positions, 'row_offsets': row_offsets}

    def operator(self, arrays: Mapping[str, Any], leaf: MatrixLeaf) -> csr_matrix.CsrMatrix:
        return csr_matrix.CsrMatrix(**arrays)


@dataclasses.dataclass(frozen=True)
class Smaller:
    """A dense matrix without the inputs and outputs (channels of a convolution) that are zero."""

    def __str__(self) -> str:
        return 'smaller'

    def why_not(self, leaf: MatrixLeaf) -> str | None:
        """Why it cannot run a leaf; `None` if it can."""
        return None

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        # A list of channels or outputs that is filled up names some that are zero.
        channels, outputs = (
            np.sort(_flagged_first(used), axis=1) for used in used_lines(leaf, matrices != 0)
        )
        small = matrices.reshape(len(matrices), leaf.window, -1, leaf.outputs)
        number_of_channels = small.shape[2]
        small = np.take_along_axis(small, channels[:, None, :, None], axis=2)
        small = np.take_along_axis(small, outputs[:, None, None, :], axis=3)
        count = outputs.shape[1]
        arrays: Arrays = {'matrix': small.reshape(len(matrices), -1, count)}
        if channels.shape[1] < number_of_channels:
            arrays['inputs'] = channels.astype(np.int32)
        if count < leaf.outputs:
            columns = np.full((len(matrices), leaf.outputs), count, np.int32)
            np.put_along_axis(columns, outputs, np.arange(count)[None], axis=1)
            arrays['outputs'] = columns
        return arrays

    def operator(self, arrays: Mapping[str, Any], leaf: MatrixLeaf) -> 'SmallerMatrix':
        return SmallerMatrix(**arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallerMatrix:
    """A dense matrix without inputs and outputs that are zero; for a convolution, without such channels.

    Attributes:
      matrix: [kept inputs, kept outputs].
      inputs: int32[kept inputs], or channels; `None` if all stay.
      outputs: int32[outputs], for each output its column of the matrix; the number of columns, if it is zero. `None` if
        all stay.
    """

    matrix: jax.Array
    inputs: jax.Array | None = None
    outputs: jax.Array | None = None

    def multiply(self, rows: jax.Array, dtype: Any = None) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`, added up in a type."""
        rows = self._kept(rows)
        return self._spread(jnp.matmul(rows, self.matrix, preferred_element_type=dtype))

    def convolve(self, image: jax.Array, convolution: Convolution) -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        image = self._kept(image)
        kernel = self.matrix.reshape(*convolution.window, image.shape[-1], -1)
        return self._spread(convolution.run(image, kernel))

    def _kept(self, values: jax.Array) -> jax.Array:
        if self.inputs is None:
            return values
        return jnp.take(values, self.inputs, axis=-1, mode='clip')

    def _spread(self, values: jax.Array) -> jax.Array:
        """Puts outputs in their places, and zeros in the others.

        Scattering columns is slow on CPUs. So they are gathered, and those of zeros come from an additional column.
        """
        if self.outputs is None:
            return values
        with_zeros = jnp.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, 1)])
        return jnp.take(with_zeros, self.outputs, axis=-1, mode='clip')


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of one shape, the same number for each group of outputs."""

    block: BlockShape

    def __str__(self) -> str:
        return f'blocks {self.block[0]}x{self.block[1]}'

    def why_not(self, leaf: MatrixLeaf) -> str | None:
        """Why it cannot run a leaf; `None` if it can."""
        if self.block[0] > leaf.inputs or self.block[1] > leaf.outputs:
            return f'the matrix of {leaf.inputs} x {leaf.outputs} is smaller than a block'
        return _too_large_windows(leaf)

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        by_group = in_blocks(matrices, *self.block)
        # The blocks that fill a group up hold zeros.
        indices = _flagged_first(by_group.any((-2, -1)))
        values = np.take_along_axis(by_group, indices[..., None, None], axis=2)
        return {'values': values, 'indices': indices.astype(np.int32)}

    def operator(self, arrays: Mapping[str, Any], leaf: MatrixLeaf) -> BlockMatrix:
        return BlockMatrix(**arrays, outputs=leaf.outputs)


Format = Csr | Smaller | Blocks
_BLOCKS = re.compile(r'blocks ([1-9]\d*)x([1-9]\d*)')


def parse(text: Any, leaf: MatrixLeaf, nonzero: np.ndarray) -> Format | None:
    """The format that a text names for a leaf, `None` for dense; `'blocks'` means those that promise most.

    Raises:
      ValueError: there is no such format.
    """
    if text == DENSE:
        return None
    if text == 'csr':
        return Csr()
    if text == 'smaller':
        return Smaller()
    if text == 'blocks':
        smallest = _BLOCK_INPUTS[-1], _BLOCK_OUTPUTS[-1]
        return Blocks(next(iter(best_blocks(nonzero, math.inf)), smallest))
    match = _BLOCKS.fullmatch(text) if isinstance(text, str) else None
    if not match:
        raise ValueError(
            f"no format {text!r}; the formats are dense, csr, smaller, blocks, and blocks of a shape, 'blocks 8x128'; "
            "for a whole model also 'measure' and 'channels'"
        )
    return Blocks((int(match[1]), int(match[2])))


def candidates(leaf: MatrixLeaf, nonzero: np.ndarray) -> list[Format]:
    """The formats that may be faster than dense."""
    formats: list[Format] = []
    if nonzero.mean() <= _LARGEST_SHARE_OF_CSR:
        formats.append(Csr())
    share = 1.0
    for used in used_lines(leaf, nonzero):
        share *= _largest(used.sum(1)) / used.shape[1]
    if share <= _LARGEST_SHARE_OF_SMALLER:
        formats.append(Smaller())
    formats += map(Blocks, best_blocks(nonzero, _LARGEST_COST)[:_MEASURED_SHAPES])
    return [format for format in formats if not format.why_not(leaf)]


def used_lines(leaf: MatrixLeaf, nonzero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which inputs and outputs have weights: bool[layers, inputs], bool[layers, outputs].

    With a window of several elements inputs are channels: the rows of a matrix are the elements of the window, each
    with all channels.
    """
    used_inputs = nonzero.any(2).reshape(len(nonzero), leaf.window, -1)
    return used_inputs.any(1), nonzero.any(1)


def best_blocks(nonzero: np.ndarray, largest_cost: float) -> list[BlockShape]:
    """The shapes of blocks that promise a product below a cost, the fastest first.

    The cost of a shape is a rough estimate, in products of the dense matrix. The best shapes are then measured.

    >>> nonzero = np.zeros((1, 64, 256), bool)
    >>> nonzero[:, :8, :128] = nonzero[:, 56:, 128:] = True
    >>> best_blocks(nonzero, 0.75)[0]
    (8, 128)
    """
    _, inputs, outputs = nonzero.shape
    if nonzero.mean() > largest_cost:
        return []
    costs: dict[BlockShape, float] = {}
    for width, height in itertools.product(_BLOCK_OUTPUTS, _BLOCK_INPUTS):
        if height > inputs or width > outputs:
            continue
        by_group = in_blocks(nonzero, height, width).any((-2, -1))
        stored = by_group.shape[1] * _largest(by_group.sum(-1)) * height * width
        # Narrow groups multiply more slowly, and single inputs are gathered more slowly.
        cost = (1 + 64 / width) * (1 + 0.5 / height) * stored / (inputs * outputs)
        if cost <= largest_cost:
            costs[height, width] = cost
    return sorted(costs, key=costs.__getitem__)


def _flagged_first(flags: np.ndarray) -> np.ndarray:
    """The flagged positions along the last axis, in lists of one length; other positions fill short lists up."""
    order = np.argsort(~flags, axis=-1, kind='stable')
    return order[..., : _largest(flags.sum(-1))]


def _largest(counts: np.ndarray) -> int:
    """The largest count, at least one: arrays that are stored are never empty."""
    return max(int(counts.max(initial=0)), 1)


def _too_large_windows(leaf: MatrixLeaf) -> str | None:
    """Says that the windows of a convolution would take much memory; `None` if not."""
    size = leaf.flops // (2 * leaf.outputs) * leaf.dtype.itemsize
    if leaf.op == 'conv' and size > _MOST_WINDOW_BYTES:
        return f'the windows of its images would take {size >> 20} MiB'
    return None
