"""All executed formats, and those that a setting means."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.sparse.execution.executed_formats.base import ExecutedFormat, UnsuitableFormatError
from jaxpruner.sparse.execution.executed_formats.blocks import ExecutedBlocks
from jaxpruner.sparse.execution.executed_formats.csr import ExecutedCsr
from jaxpruner.sparse.execution.executed_formats.smaller import ExecutedSmaller
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

FORMATS: tuple[type[ExecutedFormat], ...] = (ExecutedCsr, ExecutedSmaller, ExecutedBlocks)
DENSE = 'dense'  # the product as it is, which has no class
NAMES = (DENSE, *[each.name for each in FORMATS])


def parse(text: Any) -> ExecutedFormat | None:
    """The format of a text; `None` for dense.

    Raises:
      ValueError: there is no such format.

    >>> parse('blocks 8x128'), parse('dense')
    (ExecutedBlocks(block=(8, 128)), None)
    """
    if text == DENSE:
        return None
    if isinstance(text, str):
        for each in FORMATS:
            format = each.parse(text)
            if format is not None:
                return format
    raise ValueError(
        f"no format {text!r}; the formats are {', '.join(NAMES)}, and blocks of a shape, 'blocks 8x128'; for a whole "
        "model also 'measure' and 'channels'"
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
