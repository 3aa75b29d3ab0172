"""The formats in which products can be executed: what each stores of a matrix, and why it may not suit one.

A format packs matrices into a dictionary of arrays with the layers in front. Inside of the model it makes an operator
of these arrays. All layers of a stack have arrays of one length; shorter ones are filled up with zeros. `FORMATS` at
the end lists the classes. All that is known about a format stands in its class.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxpruner.sparse.execution.empty_operators import EmptyBlocks, EmptyCsr, EmptyDense
from jaxpruner.sparse.execution.operators import Smaller, TransposedCsr
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern, largest_count
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.operators.block_kernels.choosing import BLOCKS as KERNEL_BLOCKS
from jaxpruner.sparse.operators.block_kernels.choosing import why_missing as why_no_kernel
from jaxpruner.sparse.operators.block_kernels.product import multiply as multiply_in_kernel
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

PackedArrays = dict[str, np.ndarray]

# Formats that store a larger share of the matrix are not measured: they have never been faster.
_LARGEST_CSR_SHARE = 0.3
_LARGEST_SMALLER_SHARE = 0.95
# Without a kernel, blocks are measured if their estimated cost is below this, in products of the dense matrix. In the
# estimate, narrow blocks cost more (`ZeroPattern.best_blocks`).
_LARGEST_BLOCK_COST = 0.85
# In a kernel, narrow blocks do not cost more. Blocks are measured there if they store at most this share of the matrix.
_LARGEST_KERNEL_SHARE = 0.85
_MEASURED_BLOCK_SHAPES = 3
_MOST_WINDOW_BYTES = 1 << 28
KERNEL = 'kernel'  # for accelerators, in the name of a format


class UnsuitableFormatError(ValueError):
    """A format cannot run a product; its text is the reason, without the name of the leaf."""


class ExecutedFormat(abc.ABC):
    """A way to run a product. Its text is its name in settings, reports and files.

    Attributes:
      name: what a setting calls the format; for a class with parameters, such as the shape of blocks, it means any of
        them.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> 'ExecutedFormat | None':
        """The format whose text this is; `None` if no format of this class has it."""
        return cls() if text == cls.name else None

    @classmethod
    def most_promising(cls, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> 'ExecutedFormat':
        """The format that a setting means by `name`.

        Raises:
          UnsuitableFormatError: there is none for this leaf.
        """
        return cls()

    @classmethod
    def candidates(
        cls, matrix_leaf: MatrixLeaf, pattern: ZeroPattern
    ) -> 'tuple[list[ExecutedFormat], dict[str, str]]':
        """The formats of this class that may be measured, and why others are not, by name."""
        return [cls()], {}

    @abc.abstractmethod
    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        """Why it cannot run a product, or `None`."""

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        """Why it is not measured, since it would hardly be faster than dense; `None` if it is."""
        return None

    @abc.abstractmethod
    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        """The arrays of matrices `[layers, inputs, outputs]`, each with the layers in front."""

    @abc.abstractmethod
    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        """The operator that multiplies, made of arrays inside of a program."""

    @abc.abstractmethod
    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        """An operator that reads and writes like that of this format, and multiplies next to nothing."""


@dataclasses.dataclass(frozen=True)
class ExecutedCsr(ExecutedFormat):
    """Single weights, in the CSR of the matrix transposed."""

    name: ClassVar[str] = 'csr'

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        return csr_kernel.why_missing(matrix_leaf.computed_dtype) or _why_no_windows(matrix_leaf)

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        if pattern.density > _LARGEST_CSR_SHARE:
            return f'{pattern.density:.0%} of the weights are not zero'
        return None

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        transposed = matrices.swapaxes(1, 2)
        weights = ZeroPattern.of(matrices).weights
        layers, outputs, _ = transposed.shape
        compressed = np.zeros((layers, weights), matrices.dtype)
        column_indices = np.zeros((layers, weights), np.int32)
        row_offsets = np.zeros((layers, outputs + 1), np.int32)
        row_numbers = np.arange(outputs + 1)
        for layer, matrix in enumerate(transposed):
            rows, columns = np.nonzero(matrix)
            count = len(rows)
            # Numbers that fill a layer up stand behind its last row, and are never read.
            compressed[layer, :count] = matrix[rows, columns]
            column_indices[layer, :count] = columns
            row_offsets[layer] = np.searchsorted(rows, row_numbers)
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
class ExecutedBlocks(ExecutedFormat):
    """Blocks of one shape, the same number for each group of outputs; a kernel may multiply them."""

    block: BlockShape
    in_kernel: bool = False

    name: ClassVar[str] = 'blocks'
    _TEXT: ClassVar[re.Pattern[str]] = re.compile(rf'({KERNEL} )?blocks (\d+)x(\d+)')

    def __str__(self) -> str:
        block_inputs, block_outputs = self.block
        blocks = f'{self.name} {block_inputs}x{block_outputs}'
        return f'{KERNEL} {blocks}' if self.in_kernel else blocks

    @classmethod
    def parse(cls, text: str) -> 'ExecutedBlocks | None':
        match = cls._TEXT.fullmatch(text)
        if match is None:
            return None
        kernel, block_inputs, block_outputs = match.groups()
        block = int(block_inputs), int(block_outputs)
        if not all(block):
            return None
        return cls(block, in_kernel=kernel is not None)

    @classmethod
    def most_promising(cls, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> 'ExecutedBlocks':
        shapes = pattern.best_blocks(math.inf, 1)
        if not shapes:
            size = f'{matrix_leaf.inputs} x {matrix_leaf.outputs}'
            raise UnsuitableFormatError(f'the matrix of {size} is smaller than any block')
        return cls(shapes[0])

    @classmethod
    def candidates(
        cls, matrix_leaf: MatrixLeaf, pattern: ZeroPattern
    ) -> tuple[list[ExecutedFormat], dict[str, str]]:
        formats: list[ExecutedFormat] = []
        refused = {}
        shapes = pattern.best_blocks(_LARGEST_BLOCK_COST, _MEASURED_BLOCK_SHAPES)
        formats += map(cls, shapes)
        if not shapes:
            refused[cls.name] = 'no shape of block leaves out enough of the matrix'
        no_kernel = why_no_kernel(matrix_leaf.computed_dtype, KERNEL_BLOCKS[0])
        if no_kernel:
            refused[f'{KERNEL} {cls.name}'] = no_kernel
        else:
            formats += [cls(block, in_kernel=True) for block in KERNEL_BLOCKS]
        return formats, refused

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
        block_inputs, block_outputs = self.block
        if block_inputs > inputs or block_outputs > outputs:
            return f'the matrix of {inputs} x {outputs} is smaller than a block'
        missing = self._why_not_in_kernel(matrix_leaf, pattern) if self.in_kernel else None
        return missing or _why_no_windows(matrix_leaf)

    def _why_not_in_kernel(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        dtype = matrix_leaf.computed_dtype
        result_dtype = matrix_leaf.result_dtype
        if result_dtype != dtype:
            return (
                f'the kernel returns {dtype}, and the model asks for {result_dtype} '
                "(preferred_element_type); use 'blocks' without a kernel"
            )
        return why_no_kernel(dtype, self.block, stored=pattern.stored_blocks(self.block))

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        if not self.in_kernel:  # `candidates` has looked at the cost
            return None
        share = pattern.block_share(self.block)
        if share > _LARGEST_KERNEL_SHARE:
            return f'its blocks store {share:.0%} of the matrix'
        return None

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        has_weights = ZeroPattern.of(matrices).blocks(self.block)
        layers, groups, candidates = has_weights.shape
        # The blocks that fill a group up hold zeros.
        indices = _flagged_first(has_weights)
        block_inputs, block_outputs = self.block
        padded_shape = layers, candidates * block_inputs, groups * block_outputs
        padded = np.zeros(padded_shape, matrices.dtype)
        padded[:, : matrix_leaf.inputs, : matrix_leaf.outputs] = matrices
        cut = padded.reshape(layers, candidates, block_inputs, groups, block_outputs)
        by_group = cut.transpose(0, 3, 1, 2, 4)
        of_whole_blocks = indices[..., None, None]
        values = np.take_along_axis(by_group, of_whole_blocks, axis=2)
        return {'values': values, 'indices': indices.astype(np.int32)}

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
class ExecutedSmaller(ExecutedFormat):
    """A dense matrix without the inputs and outputs (channels of a convolution) that are zero."""

    name: ClassVar[str] = 'smaller'

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        return None

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        used_channels = pattern.used_inputs(matrix_leaf.window)
        used_outputs = pattern.used_outputs()
        inputs = largest_count(used_channels.sum(-1)) * matrix_leaf.window
        outputs = largest_count(used_outputs.sum(-1))
        share = inputs * outputs / (matrix_leaf.inputs * matrix_leaf.outputs)
        if share <= _LARGEST_SMALLER_SHARE:
            return None
        return 'no inputs or outputs are zero' if share == 1 else 'few inputs and outputs are zero'

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        pattern = ZeroPattern.of(matrices)
        layers, _, outputs = matrices.shape
        # A list of channels or outputs that is filled up names some that are zero.
        kept_channels = _flagged_ascending(pattern.used_inputs(matrix_leaf.window))
        kept_outputs = _flagged_ascending(pattern.used_outputs())
        by_window = matrices.reshape(layers, matrix_leaf.window, -1, outputs)
        channels = by_window.shape[2]
        of_channels = kept_channels[:, None, :, None]
        small = np.take_along_axis(by_window, of_channels, axis=2)
        of_outputs = kept_outputs[:, None, None, :]
        small = np.take_along_axis(small, of_outputs, axis=3)
        count = kept_outputs.shape[1]
        arrays: PackedArrays = {'matrix': small.reshape(layers, -1, count)}
        if kept_channels.shape[1] < channels:
            arrays['inputs'] = kept_channels.astype(np.int32)
        if count < outputs:
            columns = np.full((layers, outputs), count, np.int32)
            kept_columns = np.arange(count)
            np.put_along_axis(columns, kept_outputs, kept_columns[None], axis=1)
            arrays['outputs'] = columns
        return arrays

    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        return Smaller(arrays['matrix'], arrays.get('inputs'), arrays.get('outputs'))

    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        return EmptyDense(matrix_leaf.outputs)


def _flagged_first(flags: np.ndarray) -> np.ndarray:
    """The flagged positions along the last axis, in lists of one length; other positions fill short lists up."""
    order = np.argsort(~flags, axis=-1, kind='stable')
    length = largest_count(flags.sum(-1))
    return order[..., :length]


def _flagged_ascending(flags: np.ndarray) -> np.ndarray:
    """The positions that `_flagged_first` returns, ascending."""
    return np.sort(_flagged_first(flags), axis=-1)


def _why_no_windows(matrix_leaf: MatrixLeaf) -> str | None:
    """Why the windows of a convolution cannot be gathered into rows."""
    if matrix_leaf.op != 'conv':
        return None
    elements = max(matrix_leaf.rows) * matrix_leaf.inputs
    count = elements * matrix_leaf.dtype.itemsize
    if count <= _MOST_WINDOW_BYTES:
        return None
    return f'the windows of its images would take {count >> 20} MiB'


FORMATS: tuple[type[ExecutedFormat], ...] = (ExecutedCsr, ExecutedSmaller, ExecutedBlocks)
DENSE = 'dense'  # the product as it is, which has no class
NAMES = (DENSE, *[each.name for each in FORMATS])


def parse(text: Any) -> ExecutedFormat | None:
    """The format of a text; `None` for dense.

    Raises:
      ValueError: there is no such format.

    >>> parse('blocks 8x128'), parse('dense')
    (ExecutedBlocks(block=(8, 128), in_kernel=False), None)
    """
    if text == DENSE:
        return None
    if isinstance(text, str):
        for each in FORMATS:
            format = each.parse(text)
            if format is not None:
                return format
    raise ValueError(
        f"no format {text!r}; the formats are {', '.join(NAMES)}, and blocks of a shape, 'blocks 8x128' "
        f"or '{KERNEL} blocks 64x128'; for a whole model also 'measure' and 'channels'"
    )


def check_known(text: Any) -> None:
    """Refuses a setting that is neither a name nor the text of a format.

    Raises:
      ValueError: there is no such format.
    """
    if text not in NAMES:
        parse(text)


def resolve(text: Any, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> ExecutedFormat | None:
    """The format of a setting for one leaf; `'blocks'` means blocks of the most promising shape.

    Raises:
      UnsuitableFormatError: it cannot run the product.
      ValueError: there is no such format.
    """
    format = _named(text, matrix_leaf, pattern)
    reason = None if format is None else format.why_not(matrix_leaf, pattern)
    if reason is not None:
        raise UnsuitableFormatError(reason)
    return format


def _named(text: Any, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> ExecutedFormat | None:
    for each in FORMATS:
        if text == each.name:
            return each.most_promising(matrix_leaf, pattern)
    return parse(text)


def candidates(
    matrix_leaf: MatrixLeaf, pattern: ZeroPattern
) -> tuple[list[ExecutedFormat], dict[str, str]]:
    """The formats that may be faster than dense, and why the others are not measured."""
    formats: list[ExecutedFormat] = []
    refused: dict[str, str] = {}
    for each in FORMATS:
        of_class, refused_of_class = each.candidates(matrix_leaf, pattern)
        formats += of_class
        refused.update(refused_of_class)
    chosen = []
    for format in formats:
        reason = format.why_not(matrix_leaf, pattern) or format.why_not_worth(matrix_leaf, pattern)
        if reason is None:
            chosen.append(format)
        else:
            refused[str(format)] = reason
    return chosen, refused


def size_in_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """The bytes of all arrays."""
    return sum(array.size * array.dtype.itemsize for array in arrays.values())
