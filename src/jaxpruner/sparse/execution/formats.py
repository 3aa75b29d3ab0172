"""The ways in which a product can be run: what each stores of a matrix, and why it may not suit one.

A format packs matrices into a dictionary of arrays with the layers in front, and makes an operator of them inside of
the model. Layers of a stack have arrays of one length; shorter ones are filled up with zeros.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.sparse.execution.empty_operators import EmptyBlocks, EmptyCsr, EmptyDense
from jaxpruner.sparse.execution.operators import Smaller, TransposedCsr
from jaxpruner.sparse.execution.patterns import Block, Pattern
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.operators.block_kernels.choosing import BLOCKS as KERNEL_BLOCKS
from jaxpruner.sparse.operators.block_kernels.choosing import why_missing as why_no_kernel
from jaxpruner.sparse.operators.block_kernels.product import multiply as multiply_in_kernel
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

Arrays = dict[str, np.ndarray]

# Formats that store a larger share of the matrix are not measured: they have never been faster.
_LARGEST_CSR = 0.3
_LARGEST_BLOCKS = 0.85  # with what narrow blocks cost more
_LARGEST_SMALLER = 0.95
_BLOCK_SHAPES = 3  # that are measured
_MOST_WINDOW_BYTES = 1 << 28
KERNEL = 'kernel'  # for accelerators, in the name of a format


class Format(abc.ABC):
    """A way to run a product; its text is its name in settings, reports and files."""

    @abc.abstractmethod
    def why_not(self, matrix_leaf: MatrixLeaf, pattern: Pattern) -> str | None:
        """Why it cannot run a product, or `None`."""

    @abc.abstractmethod
    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> Arrays:
        """The arrays of matrices `[layers, inputs, outputs]`, each with the layers in front."""

    @abc.abstractmethod
    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        """What multiplies, of arrays inside of a program."""

    @abc.abstractmethod
    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        """An operator that reads and writes as this one does, and multiplies next to nothing."""


@dataclasses.dataclass(frozen=True)
class Csr(Format):
    """Single weights, in the CSR of the matrix transposed."""

    def __str__(self) -> str:
        return 'csr'

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: Pattern) -> str | None:
        return csr_kernel.why_missing(matrix_leaf.computed_dtype) or _why_no_windows(matrix_leaf)

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> Arrays:
        transposed = matrices.swapaxes(1, 2)
        weights = Pattern.of(matrices).weights
        layers, outputs, _ = transposed.shape
        compressed = np.zeros((layers, weights), matrices.dtype)
        column_indices = np.zeros((layers, weights), np.int32)
        row_offsets = np.zeros((layers, outputs + 1), np.int32)
        for layer in range(layers):
            rows, columns = np.nonzero(transposed[layer])
            count = len(rows)
            compressed[layer, :count] = transposed[layer][rows, columns]
            column_indices[layer, :count] = columns
            # What fills up stands behind the last row, and is never read.
            row_offsets[layer, :] = np.searchsorted(rows, np.arange(outputs + 1))
        return {
            'compressed': compressed,
            'row_offsets': row_offsets,
            'column_indices': column_indices,
        }

    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        return TransposedCsr(**arrays, inputs=matrix_leaf.inputs)

    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        return EmptyCsr(matrix_leaf.outputs, matrix_leaf.computed_dtype)


@dataclasses.dataclass(frozen=True)
class Blocks(Format):
    """Blocks of some inputs by some outputs, equally many for each group of outputs; perhaps multiplied in a kernel."""

    block: Block
    in_kernel: bool = False

    def __str__(self) -> str:
        blocks = f'blocks {self.block[0]}x{self.block[1]}'
        return f'{KERNEL} {blocks}' if self.in_kernel else blocks

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: Pattern) -> str | None:
        if self.block[0] > matrix_leaf.inputs or self.block[1] > matrix_leaf.outputs:
            return f'the matrix of {matrix_leaf.inputs} x {matrix_leaf.outputs} is smaller than a block'
        if self.in_kernel:
            result_dtype = matrix_leaf.result_dtype
            if result_dtype != matrix_leaf.computed_dtype:
                return (
                    f'the kernel returns {matrix_leaf.computed_dtype}, and the model asks for {result_dtype} '
                    "(preferred_element_type); use 'blocks' without a kernel"
                )
            stored = pattern.blocks_in_group(self.block) * -(-matrix_leaf.outputs // self.block[1])
            missing = why_no_kernel(matrix_leaf.computed_dtype, self.block, stored=stored)
            if missing:
                return missing
        return _why_no_windows(matrix_leaf)

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> Arrays:
        stored = Pattern.of(matrices).blocks(self.block)
        layers, groups, candidates = stored.shape
        count = max(int(stored.sum(-1).max(initial=0)), 1)
        # Those with weights first; what fills up holds zeros.
        indices = np.argsort(~stored, axis=-1, kind='stable')[..., :count].astype(np.int32)
        block_inputs, block_outputs = self.block
        padded = np.zeros(
            (layers, candidates * block_inputs, groups * block_outputs), matrices.dtype
        )
        padded[:, : matrix_leaf.inputs, : matrix_leaf.outputs] = matrices
        cut = padded.reshape(layers, candidates, block_inputs, groups, block_outputs)
        cut = cut.transpose(0, 3, 1, 2, 4)
        values = np.take_along_axis(cut, indices[..., None, None], axis=2)
        return {'values': values, 'indices': indices}

    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        return BlockMatrix(
            arrays['values'],
            arrays['indices'],
            outputs=matrix_leaf.outputs,
            kernel=multiply_in_kernel if self.in_kernel else None,
        )

    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        kernel = multiply_in_kernel if self.in_kernel else None
        return EmptyBlocks(matrix_leaf.outputs, self.block, matrix_leaf.computed_dtype, kernel)


@dataclasses.dataclass(frozen=True)
class SmallerDense(Format):
    """A dense matrix without the inputs and outputs (channels of a convolution) that are zero."""

    def __str__(self) -> str:
        return 'smaller'

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: Pattern) -> str | None:
        return None

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> Arrays:
        pattern = Pattern.of(matrices)
        window = matrix_leaf.window
        channels = pattern.used_inputs(window)
        outputs = pattern.used_outputs()
        kept_channels, kept_outputs = _first_used(channels), _first_used(outputs)
        layers = len(matrices)
        by_window = matrices.reshape(layers, window, -1, matrix_leaf.outputs)
        small = np.take_along_axis(by_window, kept_channels[:, None, :, None], axis=2)
        small = np.take_along_axis(small, kept_outputs[:, None, None, :], axis=3)
        # A list that was filled up has channels of zeros.
        arrays: Arrays = {'matrix': small.reshape(layers, -1, kept_outputs.shape[1])}
        if kept_channels.shape[1] < channels.shape[1]:
            arrays['inputs'] = kept_channels.astype(np.int32)
        if kept_outputs.shape[1] < matrix_leaf.outputs:
            count = kept_outputs.shape[1]
            arrays['outputs'] = np.full((layers, matrix_leaf.outputs), count, np.int32)
            for layer in range(layers):
                arrays['outputs'][layer, kept_outputs[layer]] = np.arange(count)
        return arrays

    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        return Smaller(arrays['matrix'], arrays.get('inputs'), arrays.get('outputs'))

    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        return EmptyDense(matrix_leaf.outputs)


def _first_used(used: np.ndarray) -> np.ndarray:
    """Numbers of what is used, ascending, in lists of one length: int[layers, most]."""
    most = max(int(used.sum(-1).max(initial=0)), 1)
    return np.sort(np.argsort(~used, axis=-1, kind='stable')[:, :most], axis=-1)


def _why_no_windows(matrix_leaf: MatrixLeaf) -> str | None:
    """Why the windows of a convolution cannot be gathered into rows."""
    if matrix_leaf.op != 'conv':
        return None
    count = max(matrix_leaf.rows) * matrix_leaf.inputs * matrix_leaf.dtype.itemsize
    if count <= _MOST_WINDOW_BYTES:
        return None
    return f'the windows of its images would take {count >> 20} MiB'


ANY_BLOCKS = 'blocks'
NAMES = ('dense', 'csr', 'smaller', ANY_BLOCKS)
_BLOCKS = re.compile(rf'({KERNEL} )?blocks (\d+)x(\d+)')


def parse(text: Any) -> Format | None:
    """The format of a name; `None` for dense.

    Raises:
      ValueError: there is no such format.

    >>> parse('blocks 8x128'), parse('dense')
    (Blocks(block=(8, 128), in_kernel=False), None)
    """
    if text == 'dense':
        return None
    for known in (Csr(), SmallerDense()):
        if text == str(known):
            return known
    match = _BLOCKS.fullmatch(text) if isinstance(text, str) else None
    block = (int(match[2]), int(match[3])) if match else (0, 0)
    if match is None or not all(block):
        raise ValueError(
            f"no format {text!r}; the formats are {', '.join(NAMES)}, and blocks of a shape, 'blocks 8x128' "
            f"or '{KERNEL} blocks 64x128'; for a whole model also 'measure' and 'channels'"
        )
    return Blocks(block, in_kernel=bool(match[1]))


class UnsuitableFormatError(ValueError):
    """A format cannot run a product; its text is the reason, without the name of the leaf."""


def resolve(text: Any, matrix_leaf: MatrixLeaf, pattern: Pattern) -> Format | None:
    """The format of a name for one product: `'blocks'` are of the shape that promises most.

    Raises:
      UnsuitableFormatError: it cannot run the product.
      ValueError: there is no such format.
    """
    if text == ANY_BLOCKS:
        shapes = pattern.best_blocks(math.inf, 1)
        if not shapes:
            size = f'{matrix_leaf.inputs} x {matrix_leaf.outputs}'
            raise UnsuitableFormatError(f'the matrix of {size} is smaller than any block')
        format: Format | None = Blocks(shapes[0])
    else:
        format = parse(text)
    reason = None if format is None else format.why_not(matrix_leaf, pattern)
    if reason is not None:
        raise UnsuitableFormatError(reason)
    return format


def candidates(matrix_leaf: MatrixLeaf, pattern: Pattern) -> tuple[list[Format], dict[str, str]]:
    """The formats that may be faster than dense, and why the others are not measured."""
    chosen: list[Format] = []
    refused: dict[str, str] = {}
    formats: list[Format] = [Csr(), SmallerDense()]
    shapes = pattern.best_blocks(_LARGEST_BLOCKS, _BLOCK_SHAPES)
    formats += map(Blocks, shapes)
    if not shapes:
        refused['blocks'] = 'no shape of block leaves out enough of the matrix'
    no_kernel = why_no_kernel(matrix_leaf.computed_dtype, KERNEL_BLOCKS[0])
    if no_kernel:
        refused[f'{KERNEL} blocks'] = no_kernel
    else:
        formats += [Blocks(block, in_kernel=True) for block in KERNEL_BLOCKS]
    for each in formats:
        reason = each.why_not(matrix_leaf, pattern) or _why_not_worth(each, matrix_leaf, pattern)
        if reason is None:
            chosen.append(each)
        else:
            refused[str(each)] = reason
    return chosen, refused


def _why_not_worth(format: Format, matrix_leaf: MatrixLeaf, pattern: Pattern) -> str | None:
    if isinstance(format, Csr) and pattern.density > _LARGEST_CSR:
        return f'{pattern.density:.0%} of the weights are not zero'
    if isinstance(format, Blocks) and format.in_kernel:
        share = pattern.block_share(format.block)
        if share > _LARGEST_BLOCKS:
            return f'its blocks store {share:.0%} of the matrix'
    if isinstance(format, SmallerDense):
        inputs = _first_used(pattern.used_inputs(matrix_leaf.window)).shape[1]
        outputs = _first_used(pattern.used_outputs()).shape[1]
        share = inputs * matrix_leaf.window * outputs / (matrix_leaf.inputs * matrix_leaf.outputs)
        if share > _LARGEST_SMALLER:
            return (
                'no inputs or outputs are zero' if share == 1 else 'few inputs and outputs are zero'
            )
    return None


def size_in_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Of all arrays."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
