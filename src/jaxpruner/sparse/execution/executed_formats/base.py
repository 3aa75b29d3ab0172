"""What every executed format is, and what several of them share."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxpruner.sparse.execution.zero_patterns import ZeroPattern, largest_count
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

PackedArrays = dict[str, np.ndarray]

_MOST_WINDOW_BYTES = 1 << 28


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


def flagged_first(flags: np.ndarray) -> np.ndarray:
    """The flagged positions along the last axis, in lists of one length; other positions fill short lists up."""
    order = np.argsort(~flags, axis=-1, kind='stable')
    length = largest_count(flags.sum(-1))
    return order[..., :length]


def flagged_ascending(flags: np.ndarray) -> np.ndarray:
    """The positions that `flagged_first` returns, ascending."""
    return np.sort(flagged_first(flags), axis=-1)


def why_no_windows(matrix_leaf: MatrixLeaf) -> str | None:
    """Why the windows of a convolution cannot be gathered into rows."""
    if matrix_leaf.op != 'conv':
        return None
    elements = max(matrix_leaf.rows) * matrix_leaf.inputs
    count = elements * matrix_leaf.dtype.itemsize
    if count <= _MOST_WINDOW_BYTES:
        return None
    return f'the windows of its images would take {count >> 20} MiB'
