"""A dense matrix without inputs and outputs that are zero."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxpruner.sparse.execution.executed_formats.base import (
    ExecutedFormat,
    PackedArrays,
    flagged_ascending,
)
from jaxpruner.sparse.execution.operators import Smaller
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern, largest_count
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

# A larger share of the matrix is not measured: it has never been faster.
_LARGEST_SHARE = 0.95


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
        if share <= _LARGEST_SHARE:
            return None
        return 'no inputs or outputs are zero' if share == 1 else 'few inputs and outputs are zero'

    def pack(self, matrices: np.ndarray, matrix_leaf: MatrixLeaf) -> PackedArrays:
        pattern = ZeroPattern.of(matrices)
        layers, _, outputs = matrices.shape
        # A list of channels or outputs that is filled up names some that are zero.
        kept_channels = flagged_ascending(pattern.used_inputs(matrix_leaf.window))
        kept_outputs = flagged_ascending(pattern.used_outputs())
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
