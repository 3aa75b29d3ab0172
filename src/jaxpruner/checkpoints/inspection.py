"""What is in a checkpoint, leaf by leaf: sparsity, structure, bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxpruner import utils
from jaxpruner.checkpoints.base import Checkpoint, Leaf
from jaxpruner.checkpoints.parts import parts_of
from jaxpruner.checkpoints.structure import Structure, Survey

# Parts that start at its multiples cut no group that is looked for.
_ROWS = 16


class LeafReport(NamedTuple):
    """One leaf.

    >>> import numpy as np
    >>> from jaxpruner.checkpoints.structure import structure_of
    >>> report = LeafReport('w', Leaf((8,), np.dtype('float32')), structure_of(np.eye(1, 8)[0]))
    >>> report.leaf.bytes, report.packed_bytes
    (32, 5)
    """

    name: str
    leaf: Leaf
    structure: Structure

    @property
    def packed_bytes(self) -> int:
        """Bytes of a mask of one bit a weight and the weights that are not zero, or dense where that is less."""
        return utils.packed_bytes(self.leaf.size, self.structure.nonzeros, self.leaf.dtype.itemsize)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        found = self.structure
        return {
            'name': self.name,
            'shape': list(self.leaf.shape),
            'dtype': self.leaf.dtype.name,
            'sparsity': found.sparsity,
            'n_of_m': found.n_of_m and found.n_of_m._asdict(),
            'block': found.block and list(found.block),
            'dead_channels': list(found.dead),
            'bytes': self.leaf.bytes,
            'packed_bytes': self.packed_bytes,
        }


def inspect_leaves(
    checkpoint: Checkpoint, on_leaf: Callable[[str, Leaf], None] = lambda name, leaf: None
) -> Iterator[LeafReport]:
    """Looks at each leaf of a checkpoint, a part at a time.

    Args:
      checkpoint: an open one.
      on_leaf: called with each tensor before its turn.

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
        survey = Survey(leaf.shape)
        for part in parts_of(leaf.shape, multiple=_ROWS):
            survey.add(part, checkpoint.read(name, part))
        yield LeafReport(name, leaf, survey.structure())


def totals(reports: Iterable[LeafReport]) -> dict[str, Any]:
    """All leaves together.

    >>> totals([])
    {'leaves': 0, 'weights': 0, 'sparsity': 0.0, 'bytes': 0, 'packed_bytes': 0}
    """
    reports = list(reports)
    weights = sum(report.leaf.size for report in reports)
    nonzeros = sum(report.structure.nonzeros for report in reports)
    return {
        'leaves': len(reports),
        'weights': weights,
        'sparsity': 1 - nonzeros / weights if weights else 0.0,
        'bytes': sum(report.leaf.bytes for report in reports),
        'packed_bytes': sum(report.packed_bytes for report in reports),
    }
