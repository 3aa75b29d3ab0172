"""What every checkpoint offers, whatever its format: names, shapes and dtypes at once, weights leaf by leaf."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxpruner.checkpoints.parts import Part


class Leaf(NamedTuple):
    """Shape and dtype of a tensor in a checkpoint.

    >>> Leaf((2, 3), np.dtype('float16')).bytes
    12
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes, stored dense."""
        return self.size * self.dtype.itemsize


@runtime_checkable
class Checkpoint(Protocol):
    """Tensors by name, read one at a time.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.ones(2)})
    ...     isinstance(open_checkpoint(Path(folder) / 'a.safetensors'), Checkpoint)
    True
    """

    path: Path
    leaves: Mapping[str, Leaf]  # in the order of their bytes
    metadata: Mapping[str, str]

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """Reads a tensor, or a part of it, into an array of its own that may be written to.

        Args:
          name: the tensor's.
          part: one of `parts_of` its shape; `None` for all of it.

        Raises:
          KeyError: there is no such tensor.
          ValueError: the file ends too early.
        """
        ...
