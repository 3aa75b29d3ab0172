"""How a product can run beside the dense one: a class for each format, and a table of them all.

A format packs matrices `[layers, inputs, outputs]` into a dictionary of arrays with the layers in front. Inside of the
model it makes an operator of these arrays. All layers of a stack have arrays of one length; shorter ones are filled up.

`nonzero` is everywhere bool[layers, inputs, outputs]: which weights are not zero.
"""

import abc
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.formats.blocks import in_blocks
from jaxpruner.sparse.operators import csr, csr_kernel
from jaxpruner.sparse.operators.blocks import BlockMatrix, BlockShape
from jaxpruner.sparse.program.convolutions import Convolution
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

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


class UnsuitableFormatError(ValueError):
    """A format cannot run a product, or would hardly be faster; its text is why, without the name of the leaf."""


class ExecutedFormat(abc.ABC):
    """A way to run a product. Its text is its name in settings and reports."""

    name: ClassVar[str]  # what a setting calls it

    def __str__(self) -> str:
        return self.name

    @classmethod
    @abc.abstractmethod
    def promising(cls, leaf: MatrixLeaf, nonzero: np.ndarray) -> 'list[ExecutedFormat]':
        """Those that may be faster than dense.

        Raises:
          UnsuitableFormatError: none.
        """

    def check(self, leaf: MatrixLeaf) -> None:
        """Refuses a leaf that it cannot run; by default none.

        Raises:
          UnsuitableFormatError: it cannot.
        """
        del leaf

    @abc.abstractmethod
    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        """The arrays of matrices `[layers, inputs, outputs]`, each with the layers in front."""

    @abc.abstractmethod
    def operator(self, arrays: Mapping[str, Any], leaf: MatrixLeaf) -> Any:
        """The operator that multiplies, made of arrays inside of a program."""


@dataclasses.dataclass(frozen=True)
class Csr(ExecutedFormat):
    """Single weights, in CSR."""

    name: ClassVar[str] = 'csr'

    @classmethod
    def promising(cls, leaf: MatrixLeaf, nonzero: np.ndarray) -> list[ExecutedFormat]:
        if nonzero.mean() > _LARGEST_SHARE_OF_CSR:
            raise UnsuitableFormatError(f'{nonzero.mean():.0%} of the weights are not zero')
        return [cls()]

    def check(self, leaf: MatrixLeaf) -> None:
        missing = csr_kernel.why_missing(leaf.computed_dtype)
        if missing:
            raise UnsuitableFormatError(missing)
        _check_windows(leaf)
        if leaf.inputs * leaf.outputs > np.iinfo(np.int32).max:
            raise UnsuitableFormatError('its positions need more than 32 bits')

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

    def operator(self, arrays: Mapping[str, Any], leaf: MatrixLeaf) -> csr.CsrMatrix:
        return csr.CsrMatrix(**arrays)


@dataclasses.dataclass(frozen=True)
class Smaller(ExecutedFormat):
    """A dense matrix without the inputs and outputs (channels of a convolution) that are zero."""

    name: ClassVar[str] = 'smaller'

    @classmethod
    def promising(cls, leaf: MatrixLeaf, nonzero: np.ndarray) -> list[ExecutedFormat]:
        channels, outputs = used_lines(leaf, nonzero)
        share = math.prod(_largest(used.sum(1)) / used.shape[1] for used in (channels, outputs))
        if share > _LARGEST_SHARE_OF_SMALLER:
            raise UnsuitableFormatError(
                'no inputs or outputs are zero' if share == 1 else 'few inputs and outputs are zero'
            )
        return [cls()]

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
class Blocks(ExecutedFormat):
    """Blocks of one shape, the same number for each group of outputs. Without a shape it is the most promising one."""

    block: BlockShape | None = None

    name: ClassVar[str] = 'blocks'

    def __str__(self) -> str:
        return f'{self.name} {self.block[0]}x{self.block[1]}' if self.block else self.name

    @classmethod
    def promising(cls, leaf: MatrixLeaf, nonzero: np.ndarray) -> list[ExecutedFormat]:
        blocks = best_blocks(nonzero, _LARGEST_COST)[:_MEASURED_SHAPES]
        if not blocks:
            raise UnsuitableFormatError('no shape of block leaves out enough of the matrix')
        return [cls(block) for block in blocks]

    def check(self, leaf: MatrixLeaf) -> None:
        if not self.block or self.block[0] > leaf.inputs or self.block[1] > leaf.outputs:
            raise UnsuitableFormatError(
                f'the matrix of {leaf.inputs} x {leaf.outputs} is smaller than a block'
            )
        _check_windows(leaf)

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        assert self.block is not None
        by_group = in_blocks(matrices, *self.block)
        # The blocks that fill a group up hold zeros.
        indices = _flagged_first(by_group.any((-2, -1)))
        values = np.take_along_axis(by_group, indices[..., None, None], axis=2)
        return {'values': values, 'indices': indices.astype(np.int32)}

    def operator(self, arrays: Mapping[str, Any], leaf: MatrixLeaf) -> BlockMatrix:
        return BlockMatrix(**arrays, outputs=leaf.outputs)


FORMATS: tuple[type[ExecutedFormat], ...] = (Csr, Smaller, Blocks)
_BLOCKS = re.compile(r'blocks ([1-9]\d*)x([1-9]\d*)')


def parse(text: Any) -> ExecutedFormat | None:
    """The format of a text, `None` for dense.

    Raises:
      ValueError: there is no such format.

    >>> parse('blocks 8x128'), parse('dense')
    (Blocks(block=(8, 128)), None)
    """
    match = _BLOCKS.fullmatch(text) if isinstance(text, str) else None
    if match:
        return Blocks((int(match[1]), int(match[2])))
    if text == DENSE:
        return None
    for each in FORMATS:
        if text == each.name:
            return each()
    names = ', '.join([DENSE, *[each.name for each in FORMATS]])
    raise ValueError(
        f"no format {text!r}; the formats are {names}, and blocks of a shape, 'blocks 8x128'; for a whole model also "
        "'measure' and 'channels'"
    )


def resolve(
    format: ExecutedFormat | None, leaf: MatrixLeaf, nonzero: np.ndarray
) -> ExecutedFormat | None:
    """The format for one leaf, with a shape of blocks.

    Raises:
      UnsuitableFormatError: it cannot run the product.
    """
    if format == Blocks():
        format = Blocks(next(iter(best_blocks(nonzero, math.inf)), None))
    if format is not None:
        format.check(leaf)
    return format


def candidates(
    leaf: MatrixLeaf, nonzero: np.ndarray
) -> tuple[list[ExecutedFormat], dict[str, str]]:
    """The formats that may be faster than dense, and why the others are not measured."""
    formats: list[ExecutedFormat] = []
    refused = {}
    for each in FORMATS:
        try:
            found = each.promising(leaf, nonzero)
            found[0].check(leaf)
            formats += found
        except UnsuitableFormatError as error:
            refused[each.name] = str(error)
    return formats, refused


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


def n_by_m(nonzero: np.ndarray) -> str | None:
    """N:M along the inputs, such as `'2:4'`, if each group has at most N weights and nearly all have N.

    >>> n_by_m(np.tile([[True], [True], [False], [False]], (1, 2, 3)))
    '2:4'
    """
    _, inputs, outputs = nonzero.shape
    for m in (4, 8, 16, 32):
        if inputs % m:
            break
        counts = nonzero.reshape(-1, m, outputs).sum(1)
        n = counts.max(initial=0)
        if 0 < n < m and counts.mean() > 0.9 * n:
            return f'{n}:{m}'
    return None


def size_in_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """The bytes of all arrays."""
    return sum(array.nbytes for array in arrays.values())


def _flagged_first(flags: np.ndarray) -> np.ndarray:
    """The flagged positions along the last axis, in lists of one length; other positions fill short lists up."""
    order = np.argsort(~flags, axis=-1, kind='stable')
    return order[..., : _largest(flags.sum(-1))]


def _largest(counts: np.ndarray) -> int:
    """The largest count, at least one: arrays that are stored are never empty."""
    return max(int(counts.max(initial=0)), 1)


def _check_windows(leaf: MatrixLeaf) -> None:
    """Refuses a convolution whose windows would take much memory."""
    size = max(leaf.rows) * leaf.inputs * leaf.dtype.itemsize
    if leaf.op == 'conv' and size > _MOST_WINDOW_BYTES:
        raise UnsuitableFormatError(f'the windows of its images would take {size >> 20} MiB')
