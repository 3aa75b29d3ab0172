"""What is in a checkpoint, leaf by leaf: sparsity, structure of the zeros (N:M, dead channels), bytes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpruner.checkpoints.reading import Checkpoint

_GROUP_LENGTHS = (2, 4, 8, 16)
# Groups that have nonzeros at all have at least this share of N of them. N:M by chance leaves most groups far emptier.
_FULL = 0.75


class NOfM(NamedTuple):
    """At most n of each m weights along an axis are not zero."""

    n: int
    m: int
    axis: int


class LeafReport(NamedTuple):
    """The zeros of one leaf.

    Attributes:
      name: of the leaf.
      shape: of the leaf.
      dtype: its name.
      bytes: of the dense leaf.
      nonzeros: how many weights are not zero.
      n_of_m: the N:M pattern that they have, of several the one with the least n / m, then the least m, then along the
        last axis; `None` if there is none.
      dead_indices: of a leaf with several axes, the indices along each of them at which all weights are zero.

    >>> import numpy as np
    >>> report = inspect_array('w', np.eye(1, 8, dtype=np.float32))
    >>> report.bytes, report.dead_indices[1]
    (32, [1, 2, 3, 4, 5, 6, 7])
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    nonzeros: int
    n_of_m: NOfM | None
    dead_indices: list[list[int]]

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        weights = math.prod(self.shape)
        return 1 - self.nonzeros / weights if weights else 0.0


def inspect_leaves(checkpoint: Checkpoint) -> Iterator[LeafReport]:
    """Inspects each leaf of a checkpoint, one at a time.

    Args:
      checkpoint: an open one.

    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(pathlib.Path(folder) / 'a.safetensors', {'w': np.eye(4)})
    ...     [report.n_of_m for report in inspect_leaves(open_checkpoint(folder))]
    [NOfM(n=1, m=4, axis=1)]
    """
    for name in checkpoint.leaves:
        yield inspect_array(name, checkpoint.read(name))


def inspect_array(name: str, array: np.ndarray) -> LeafReport:
    """Inspects an array that is at hand, as `inspect_leaves` does the leaves of a checkpoint; NaN is not zero.

    >>> report = inspect_array('w', np.tile([0.0, 1.0, 2.0, 0.0], (3, 2)))
    >>> report.nonzeros, report.n_of_m, report.dead_indices
    (12, NOfM(n=1, m=2, axis=1), [[], [0, 3, 4, 7]])
    """
    mask = array != np.zeros((), array.dtype)
    nonzeros = int(np.count_nonzero(mask))
    dead_indices: list[list[int]] = []
    patterns = []
    for axis in range(mask.ndim if mask.ndim > 1 and mask.size else 0):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        dead_indices.append(np.flatnonzero(~mask.any(others)).tolist())
    if 0 < nonzeros < mask.size:
        for axis in range(mask.ndim):
            counts = np.moveaxis(mask, axis, -1).view(np.uint8)
            for m in _GROUP_LENGTHS:
                if mask.shape[axis] % m:
                    break
                counts = counts[..., 0::2] + counts[..., 1::2]  # the nonzeros of each group
                n = int(counts.max())
                if n < m and nonzeros >= _FULL * n * np.count_nonzero(counts):
                    patterns.append(NOfM(n, m, axis))
    best = min(patterns, key=lambda each: (each.n / each.m, each.m, -each.axis), default=None)
    dtype = array.dtype.name
    return LeafReport(name, array.shape, dtype, array.nbytes, nonzeros, best, dead_indices)
