"""Blocks of one shape."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxpruner.sparse.execution.executed_formats.base import (
    ExecutedFormat,
    PackedArrays,
    UnsuitableFormatError,
    flagged_first,
    why_no_windows,
)
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

# Blocks are measured if their estimated cost is below this, in products of the dense matrix.
_LARGEST_COST = 0.85
_MEASURED_SHAPES = 3


@dataclasses.dataclass(frozen=True)
class ExecutedBlocks(ExecutedFormat):
    """Blocks of one shape, the same number for each group of outputs."""

    block: BlockShape

    name: ClassVar[str] = 'blocks'
    _TEXT: ClassVar[re.Pattern[str]] = re.compile(r'blocks (\d+)x(\d+)')

    def __str__(self) -> str:
        block_inputs, block_outputs = self.block
        return f'{self.name} {block_inputs}x{block_outputs}'

    @classmethod
    def parse(cls, text: str) -> 'ExecutedBlocks | None':
        match = cls._TEXT.fullmatch(text)
        if match is None:
            return None
        block_inputs, block_outputs = match.groups()
        block = int(block_inputs), int(block_outputs)
        return cls(block) if all(block) else None

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
        shapes = pattern.best_blocks(_LARGEST_COST, _MEASURED_SHAPES)
        if not shapes:
            return [], {cls.name: 'no shape of block leaves out enough of the matrix'}
        return [cls(block) for block in shapes], {}

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
        block_inputs, block_outputs = self.block
        if block_inputs > inputs or block_outputs > outputs:
            return f'the matrix of {inputs} x {outputs} is smaller than a block'
        return why_no_windows(matrix_leaf)

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
        return BlockMatrix(arrays['values'], arrays['indices'], outputs=matrix_leaf.outputs)
