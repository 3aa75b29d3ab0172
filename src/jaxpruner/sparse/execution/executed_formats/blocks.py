"""Blocks of one shape, multiplied with or without a kernel."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxpruner.sparse.execution.empty_operators import EmptyBlocks
from jaxpruner.sparse.execution.executed_formats.base import (
    ExecutedFormat,
    PackedArrays,
    UnsuitableFormatError,
    flagged_first,
    why_no_windows,
)
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern
from jaxpruner.sparse.operators.block_kernels.choosing import BLOCKS as KERNEL_BLOCKS
from jaxpruner.sparse.operators.block_kernels.choosing import why_missing as why_no_kernel
from jaxpruner.sparse.operators.block_kernels.product import multiply as multiply_in_kernel
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

# Without a kernel, blocks are measured if their estimated cost is below this, in products of the dense matrix. In the
# estimate, narrow blocks cost more (`ZeroPattern.best_blocks`).
_LARGEST_COST = 0.85
# In a kernel, narrow blocks do not cost more. Blocks are measured there if they store at most this share of the matrix.
_LARGEST_KERNEL_SHARE = 0.85
_MEASURED_SHAPES = 3
KERNEL = 'kernel'  # for accelerators, in the name of a format


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
        shapes = pattern.best_blocks(_LARGEST_COST, _MEASURED_SHAPES)
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
        return missing or why_no_windows(matrix_leaf)

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
        indices = flagged_first(has_weights)
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
