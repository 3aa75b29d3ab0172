"""Reads orbax checkpoints one leaf at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.orbax_errors import orbax_errors
from jaxpruner.checkpoints.parts import Part
from jaxpruner.core import tree as tree_lib

_REMEDY = 'it is damaged or was copied in part; copy or save it anew'


class OrbaxFolder:
    """A folder that orbax has saved a pytree in, as a checkpoint; `'a/b/kernel'` is a leaf's name.

    One leaf is held at a time, whole. Releases of orbax that know no placeholders restore the whole tree for each.

    Args:
      path: the folder with `_METADATA` in it.

    Raises:
      ValueError: orbax cannot read it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ocp.PyTreeCheckpointer() as checkpointer:
    ...         checkpointer.save(Path(folder) / 'saved', {'layer': {'kernel': np.arange(2)}})
    ...     OrbaxFolder(Path(folder) / 'saved').read('layer/kernel')
    array([0, 1])
    """

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        self.metadata: Mapping[str, str] = {}
        self._held: tuple[str, np.ndarray] | None = None
        with _orbax(self.path) as checkpointer:
            described: Any = checkpointer.metadata(self.path)
            # Releases differ in how deep the tree lies.
            for inside in ('item_metadata', 'tree'):
                described = getattr(described, inside, described)
            paths, leaves, self._treedef = tree_lib.flatten_with_paths(described)
        self._names = [tree_lib.path_string(path) for path in paths]
        self.leaves: Mapping[str, Leaf] = {
            name: Leaf(tuple(leaf.shape), np.dtype(leaf.dtype))
            for name, leaf in zip(self._names, leaves, strict=True)
            if hasattr(leaf, 'shape')  # no strings
        }
        if not self.leaves:  # for some kinds of damage orbax only logs a warning
            raise ValueError(
                f'{self.path}: orbax finds no arrays in what was saved here; {_REMEDY}'
            )

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """A tensor, or a part of it; see `Checkpoint`."""
        leaf = self.leaves[name]
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next is read, not after
            self._held = name, self._restore(name).astype(leaf.dtype, copy=False)
        array = self._held[1]
        if part is None:
            return array.copy()
        return array.reshape(-1)[part.start : part.start + part.size].reshape(part.shape).copy()

    def _restore(self, name: str) -> np.ndarray:
        others = getattr(ocp, 'PLACEHOLDER', 0)
        item = jax.tree.unflatten(
            self._treedef, [0 if other == name else others for other in self._names]
        )
        restore_args = jax.tree.unflatten(
            self._treedef, [ocp.RestoreArgs(restore_type=np.ndarray)] * len(self._names)
        )
        with _orbax(self.path, name) as checkpointer:
            restored = checkpointer.restore(
                self.path, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
            )
            return np.asarray(self._treedef.flatten_up_to(restored)[self._names.index(name)])


@contextlib.contextmanager
def _orbax(path: Path, leaf: str = '') -> Iterator[Any]:
    """A checkpointer whose errors are one line."""
    what = f'{leaf}, which was saved here' if leaf else 'what was saved here'
    with (
        orbax_errors(f'{path}: orbax cannot read {what}', _REMEDY),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        yield checkpointer
