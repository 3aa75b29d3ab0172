"""What is in a checkpoint, leaf by leaf: sparsity, structure, bytes."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import utils
from jaxpruner.checkpoints.base import Checkpoint, Leaf
from jaxpruner.checkpoints.parts import Part, parts_of
from jaxpruner.checkpoints.structure import LONGEST_GROUP, Structure, Survey


class LeafReport(NamedTuple):
    """The structure of one leaf.

    Attributes:
      name: of the leaf.
      leaf: its shape and dtype.
      structure: of its zeros.
      zeros: for each axis, whether all weights at an index are zero.

    >>> import numpy as np
    >>> report = inspect_array('w', np.eye(1, 8, dtype=np.float32)[0])
    >>> report.leaf.bytes, report.packed_bytes, report.zeros[0].tolist()[:3]
    (32, 5, [False, True, True])
    """

    name: str
    leaf: Leaf
    structure: Structure
    zeros: tuple[np.ndarray, ...] = ()

    @property
    def dead_indices(self) -> list[list[int]]:
        """Of a leaf with several axes, the indices along each of them at which all weights are zero."""
        zeros = self.zeros if len(self.zeros) > 1 else ()
        return [np.flatnonzero(flags).tolist() for flags in zeros]

    @property
    def packed_bytes(self) -> int:
        """Bytes of a mask of one bit a weight and the nonzero weights, or dense where that is less."""
        return utils.packed_bytes(self.leaf.size, self.structure.nonzeros, self.leaf.dtype.itemsize)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as it stands in JSON."""
        structure = self.structure
        return {
            'name': self.name,
            'shape': list(self.leaf.shape),
            'dtype': self.leaf.dtype.name,
            'sparsity': structure.sparsity,
            'n_of_m': structure.n_of_m and structure.n_of_m._asdict(),
            'block': structure.block and list(structure.block),
            'dead_channels': list(structure.dead),
            'dead_indices': self.dead_indices,
            'bytes': self.leaf.bytes,
            'packed_bytes': self.packed_bytes,
        }


def inspect_leaves(
    checkpoint: Checkpoint, on_leaf: Callable[[str, Leaf], None] = lambda name, leaf: None
) -> Iterator[LeafReport]:
    """Inspects each leaf of a checkpoint, a part at a time.

    Args:
      checkpoint: an open one.
      on_leaf: called with each tensor before it is read.

    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(pathlib.Path(folder) / 'a.safetensors', {'w': np.eye(4)})
    ...     [str(report.structure.n_of_m) for report in inspect_leaves(open_checkpoint(folder))]
    ['1:4 along axis 1']
    """
    for name, leaf in checkpoint.leaves.items():
        on_leaf(name, leaf)
        yield _inspect(name, leaf, functools.partial(checkpoint.read, name))


def inspect_array(name: str, array: np.ndarray) -> LeafReport:
    """Inspects an array that is at hand, as `inspect_leaves` does the leaves of a checkpoint."""
    return _inspect(name, Leaf(array.shape, array.dtype), lambda part: part.of(array))


def _inspect(name: str, leaf: Leaf, read: Callable[[Part], np.ndarray]) -> LeafReport:
    survey = Survey(leaf.shape)
    for part in parts_of(leaf.shape, multiple=LONGEST_GROUP):
        survey.add(part, read(part))
    return LeafReport(name, leaf, survey.structure(), survey.zeros)


def totals(reports: Iterable[LeafReport]) -> dict[str, Any]:
    """Adds up all leaves, as JSON has them."""
    leaves = weights = nonzeros = dense_bytes = packed_bytes = 0
    for report in reports:
        leaves += 1
        weights += report.leaf.size
        nonzeros += report.structure.nonzeros
        dense_bytes += report.leaf.bytes
        packed_bytes += report.packed_bytes
    return {
        'leaves': leaves,
        'weights': weights,
        'sparsity': 1 - nonzeros / weights if weights else 0.0,
        'bytes': dense_bytes,
        'packed_bytes': packed_bytes,
    }
