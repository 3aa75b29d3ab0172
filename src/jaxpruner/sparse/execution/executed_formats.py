"""The formats in which products can be executed: what each stores of a matrix, and why it may not suit one.

A format packs matrices into a dictionary of arrays with the layers in front, and makes an operator of them inside of
the model. Layers of a stack have arrays of one length; shorter ones are filled up with zeros. `FORMATS` at the end
lists the classes; all that is known of a format stands in its class.
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
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern
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
# Without a kernel, blocks are measured if their estimated cost is below this, in products of the dense matrix. The
# estimate adds what narrow blocks cost more (`ZeroPattern.best_blocks`).
_LARGEST_BLOCK_COST = 0.85
# In a kernel, narrow blocks cost no more. These are measured if they store at most this share of the matrix.
_LARGEST_KERNEL_SHARE = 0.85
_MEASURED_BLOCK_SHAPES = 3
_MOST_WINDOW_BYTES = 1 << 28
KERNEL = 'kernel'  # for accelerators, in the name of a format


class UnsuitableFormatError(ValueError):
    """A format cannot run a product; its text is the reason, without the name of the leaf."""


class ExecutedFormat(abc.ABC):
    """A way to run a product. Its text is its name in settings, reports and files.

    Attributes:
      name: what a setting calls the format, or any one of a class with parameters, such as blocks of any shape.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> 'ExecutedFormat | None':
        """The format whose text this is; `None` if it is none of this class."""
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
        """The formats of this class that are worth a look, and why others are not, by name."""
        return [cls()], {}

    @abc.abstractmethod
    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        """Why it cannot run a product, or `None`."""

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        """Why it cannot be faster than dense, or `None`: it is then measured."""
        return None

    @abc.abstractmethod
    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        """The arrays of matrices `[layers, inputs, outputs]`, each with the layers in front."""

    @abc.abstractmethod
    def operator(self, arrays: Mapping[str, Any], matrix_leaf: MatrixLeaf) -> Any:
        """The operator that multiplies, made of arrays inside of a program."""

    @abc.abstractmethod
    def empty(self, matrix_leaf: MatrixLeaf) -> Any:
        """An operator that reads and writes as this one does, and multiplies next to nothing."""


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
class ExecutedBlocks(ExecutedFormat):
    """Blocks of some inputs by some outputs, equally many for each group of outputs; perhaps multiplied in a kernel."""

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
        return cls(block, in_kernel=kernel is not None) if all(block) else None

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

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        if not self.in_kernel:  # `candidates` has looked at the cost
            return None
        share = pattern.block_share(self.block)
        if share > _LARGEST_KERNEL_SHARE:
            return f'its blocks store {share:.0%} of the matrix'
        return None

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        stored = ZeroPattern.of(matrices).blocks(self.block)
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
class ExecutedSmaller(ExecutedFormat):
    """A dense matrix without the inputs and outputs (channels of a convolution) that are zero."""

    name: ClassVar[str] = 'smaller'

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        return None

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        inputs = _first_used(pattern.used_inputs(matrix_leaf.window)).shape[1]
        outputs = _first_used(pattern.used_outputs()).shape[1]
        kept = inputs * matrix_leaf.window * outputs
        share = kept / (matrix_leaf.inputs * matrix_leaf.outputs)
        if share <= _LARGEST_SMALLER_SHARE:
            return None
        return 'no inputs or outputs are zero' if share == 1 else 'few inputs and outputs are zero'

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        pattern = ZeroPattern.of(matrices)
        window = matrix_leaf.window
        channels = pattern.used_inputs(window)
        outputs = pattern.used_outputs()
        kept_channels, kept_outputs = _first_used(channels), _first_used(outputs)
        layers = len(matrices)
        by_window = matrices.reshape(layers, window, -1, matrix_leaf.outputs)
        small = np.take_along_axis(by_window, kept_channels[:, None, :, None], axis=2)
        small = np.take_along_axis(small, kept_outputs[:, None, None, :], axis=3)
        # A list that was filled up has channels of zeros.
        arrays: PackedArrays = {'matrix': small.reshape(layers, -1, kept_outputs.shape[1])}
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
    """The format of a setting for one leaf: `'blocks'` are of the shape that promises most.

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
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
