"""What is in a checkpoint, leaf by leaf: sparsity, structure of the zeros (N:M, blocks, dead channels), bytes."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import tree as tree_lib
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


class LeafReport(NamedTuple):
    """The zeros of one leaf.

    Attributes:
      name: of the leaf.
      leaf: its shape and dtype.
      nonzeros: how many weights are not zero.
      n_of_m: the N:M pattern that they have, of several the one with the least n / m, then the least m, then along the
        last axis; `None` if there is none.
      block: height and width over the last two axes of blocks that are all zero or all nonzero; or `None`.
      dead_indices: of a leaf with several axes, the indices along each of them at which all weights are zero.

    >>> import numpy as np
    >>> report = inspect_array('w', np.eye(1, 8, dtype=np.float32))
    >>> report.leaf.bytes, report.dead_indices[1]
    (32, [1, 2, 3, 4, 5, 6, 7])
    """

    name: str
    leaf: Leaf
    nonzeros: int
    n_of_m: NOfM | None
    block: tuple[int, int] | None
    dead_indices: list[list[int]]

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return 1 - self.nonzeros / self.leaf.size if self.leaf.size else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as it stands in JSON."""
        return {
            'name': self.name,
            'shape': list(self.leaf.shape),
            'dtype': self.leaf.dtype.name,
            'sparsity': self.sparsity,
            'n_of_m': self.n_of_m and self.n_of_m._asdict(),
            'block': self.block and list(self.block),
            'dead_channels': list(map(len, self.dead_indices)),
            'dead_indices': self.dead_indices,
            'bytes': self.leaf.bytes,
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
    ...     [str(report.n_of_m) for report in inspect_leaves(open_checkpoint(folder))]
    ['1:4 along axis 1']
    """
    for name, leaf in checkpoint.leaves.items():
        on_leaf(name, leaf)
        yield inspect_array(name, checkpoint.read(name))


def inspect_array(name: str, array: np.ndarray) -> LeafReport:
    """Inspects an array that is at hand, as `inspect_leaves` does the leaves of a checkpoint; NaN is not zero.

    >>> report = inspect_array('w', np.tile([0.0, 1.0, 2.0, 0.0], (3, 2)))
    >>> report.nonzeros, report.n_of_m, report.block, report.dead_indices
    (12, NOfM(n=1, m=2, axis=1), None, [[], [0, 3, 4, 7]])
    """
    mask = array != np.zeros((), array.dtype)
    nonzeros = int(np.count_nonzero(mask))
    dead_indices: list[list[int]] = []
    patterns, block = [], None
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
        block = _block(mask) if mask.ndim > 1 else None
    best = min(patterns, key=lambda each: (each.n / each.m, each.m, -each.axis), default=None)
    return LeafReport(name, Leaf(array.shape, array.dtype), nonzeros, best, block, dead_indices)


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
