"""Single weights, in CSR."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxpruner.sparse.execution.executed_formats.base import (
    ExecutedFormat,
    PackedArrays,
    why_no_windows,
)
from jaxpruner.sparse.execution.operators import TransposedCsr
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

# CSR that stores a larger share of the matrix is not measured: it has never been faster.
_LARGEST_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class ExecutedCsr(ExecutedFormat):
    """Single weights, in the CSR of the matrix transposed."""

    name: ClassVar[str] = 'csr'

    def why_not(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        return csr_kernel.why_missing(matrix_leaf.computed_dtype) or why_no_windows(matrix_leaf)

    def why_not_worth(self, matrix_leaf: MatrixLeaf, pattern: ZeroPattern) -> str | None:
        if pattern.density > _LARGEST_SHARE:
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
