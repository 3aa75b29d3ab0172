"""What is in a checkpoint, leaf by leaf: sparsity, structure of the zeros (N:M, blocks, dead channels), bytes."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner import utils
from jaxpruner.checkpoints.reading import Checkpoint, Leaf
from jaxpruner.structure import ChannelGraph

_GROUP_LENGTHS = (2, 4, 8, 16)
# Groups that have nonzeros at all have at least this share of N of them. N:M by chance leaves most groups far emptier.
_FULL = 0.75


class NOfM(NamedTuple):
    """At most n of each m weights along an axis are not zero."""

    n: int
    m: int
    axis: int

    def __str__(self) -> str:
        return f'{self.n}:{self.m} along axis {self.axis}'


class Structure(NamedTuple):
    """The zeros of an array."""

    size: int
    nonzeros: int
    # Of those that hold the one with the least n / m, then the least m, then the last axis.
    n_of_m: NOfM | None
    # Height and width over the last two axes; each block is all zero or all nonzero.
    block: tuple[int, int] | None
    # For each axis the number of its indices without any nonzero; () of vectors.
    dead: tuple[int, ...]

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return 1 - self.nonzeros / self.size if self.size else 0.0


class LeafReport(NamedTuple):
    """The structure of one leaf.

    Attributes:
      name: of the leaf.
      leaf: its shape and dtype.
      structure: of its zeros.
      dead_indices: of a leaf with several axes, the indices along each of them at which all weights are zero.

    >>> import numpy as np
    >>> report = inspect_array('w', np.eye(1, 8, dtype=np.float32))
    >>> report.leaf.bytes, report.packed_bytes, report.dead_indices[1]
    (32, 5, [1, 2, 3, 4, 5, 6, 7])
    """

    name: str
    leaf: Leaf
    structure: Structure
    dead_indices: list[list[int]]

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
    """Inspects each leaf of a checkpoint, one at a time.

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
        yield inspect_array(name, checkpoint.read(name))


def inspect_array(name: str, array: np.ndarray) -> LeafReport:
    """Inspects an array that is at hand, as `inspect_leaves` does the leaves of a checkpoint; NaN is not zero.

    >>> inspect_array('w', np.tile([0.0, 1.0, 2.0, 0.0], (3, 2))).structure
    Structure(size=24, nonzeros=12, n_of_m=NOfM(n=1, m=2, axis=1), block=None, dead=(0, 4))
    """
    mask = array != np.zeros((), array.dtype)
    nonzeros = int(np.count_nonzero(mask))
    dead_indices: list[list[int]] = []
    if mask.ndim > 1 and mask.size:
        dead_indices = [
            np.flatnonzero(~_any_except(mask, axis)).tolist() for axis in range(mask.ndim)
        ]
    n_of_m, block = None, None
    if 0 < nonzeros < mask.size:
        held = [
            found for axis in range(mask.ndim) for found in _patterns_along(mask, axis, nonzeros)
        ]
        n_of_m = min(
            held, key=lambda found: (found.n / found.m, found.m, -found.axis), default=None
        )
        block = _block(mask) if mask.ndim > 1 else None
    structure = Structure(mask.size, nonzeros, n_of_m, block, tuple(map(len, dead_indices)))
    return LeafReport(name, Leaf(array.shape, array.dtype), structure, dead_indices)


def _patterns_along(mask: np.ndarray, axis: int, nonzeros: int) -> Iterator[NOfM]:
    """Yields the N:M patterns that hold along an axis, the shortest groups first."""
    counts = np.moveaxis(mask, axis, -1).view(np.uint8)
    for m in _GROUP_LENGTHS:
        if mask.shape[axis] % m:
            return
        counts = counts[..., 0::2] + counts[..., 1::2]  # the nonzeros of each group
        n = int(counts.max())
        if n < m and nonzeros >= _FULL * n * np.count_nonzero(counts):
            yield NOfM(n, m, axis)


def _block(mask: np.ndarray) -> tuple[int, int] | None:
    """Finds the largest blocks over the last two axes in which zeros stand together.

    Their sides divide all indices at which the mask changes. Blocks as long as an axis are channels instead.
    """
    *_, height, width = mask.shape
    rows = mask.reshape(-1, height, width)
    row_changes = 1 + np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any((0, 2)))
    column_changes = 1 + np.flatnonzero((rows[..., 1:] != rows[..., :-1]).any((0, 1)))
    block = (
        int(np.gcd.reduce(row_changes, initial=0)),
        int(np.gcd.reduce(column_changes, initial=0)),
    )
    return block if block[0] * block[1] > 1 else None


def _any_except(mask: np.ndarray, axis: int) -> np.ndarray:
    """Whether any weight is set behind each index of an axis."""
    return np.asarray(mask.any(tuple(other for other in range(mask.ndim) if other != axis)))


def totals(reports: Iterable[LeafReport]) -> dict[str, Any]:
    """Adds up all leaves, as JSON has them."""
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


def zero_groups(checkpoint: Checkpoint, graph: ChannelGraph) -> dict[str, np.ndarray]:
    """Finds the channels that can be removed from a model with these parameters, and nothing changes.

    Leaves are read one after another; a byte for each weight is held.

    Args:
      checkpoint: an open one, which may hold more than the model's parameters.
      graph: of the model.

    Returns:
      As `ChannelGraph.zero_channels`.

    Raises:
      ValueError: the checkpoint lacks a parameter of the model, or has it in another shape.

    >>> import pathlib, tempfile
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': np.ones((2, 4)), 'down': np.array([[1.0], [0.0], [0.0], [1.0]])}
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, np.ones((1, 2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(pathlib.Path(folder) / 'a.safetensors', params)
    ...     zero_groups(open_checkpoint(folder), graph)
    {'up[1]': array([1, 2])}
    """
    wanted = list(map(tree_lib.path_string, graph.trace.paths))
    stored_names = {_parts(name): name for name in checkpoint.leaves}
    # Something may stand before the parameters, such as `params`: the shortest with which all are there.
    prefix: tree_lib.Path = ()
    for parts in sorted(stored_names, key=len):
        candidate = parts[: -len(_parts(wanted[0]))]
        if all(candidate + _parts(name) in stored_names for name in wanted):
            prefix = candidate
            break
    flags = []
    for name in wanted:
        stored = stored_names.get(prefix + _parts(name))
        if stored is None:
            nearest = tree_lib.nearest(name, stored_names.values())
            raise ValueError(f'the checkpoint lacks {name!r}, a parameter of the model; {nearest}')
        array = checkpoint.read(stored)
        flags.append(array != np.zeros((), array.dtype))
    params = jax.tree.unflatten(jax.tree.structure(graph.model.params), flags)
    return graph.zero_channels(params)


def _parts(name: str) -> tree_lib.Path:
    """Splits a name into parts, which dots or slashes divide; flax's variables are in a box called value."""
    parts = tuple(re.split('[./]', name))
    return parts[:-1] if len(parts) > 1 and parts[-1] == 'value' else parts
