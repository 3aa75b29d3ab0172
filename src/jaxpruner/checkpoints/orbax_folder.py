"""Reads orbax checkpoints one leaf at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner import tree as tree_lib
from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.orbax_errors import orbax_errors
from jaxpruner.checkpoints.parts import Part

_REMEDY = 'it is damaged or was copied in part; copy or save it anew'


class OrbaxFolder:
    """A folder, with `_METADATA` in it, to which orbax has saved a pytree; `'a/b/kernel'` is a leaf's name.

    One leaf is held at a time, whole. Releases of orbax that know no placeholders restore the whole tree for each.
    """

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        self.metadata: Mapping[str, str] = {}
        self._held: tuple[str, np.ndarray] | None = None
        with _orbax(self.path) as checkpointer:
            tree: Any = checkpointer.metadata(self.path)
            # Releases differ in how deep the tree lies.
            for attribute in ('item_metadata', 'tree'):
                tree = getattr(tree, attribute, tree)
            paths, leaves, self._treedef = tree_lib.flatten_with_paths(tree)
        self._names = [tree_lib.path_string(path) for path in paths]
        arrays = {}
        for name, leaf in zip(self._names, leaves, strict=True):
            if hasattr(leaf, 'shape'):  # no strings
                arrays[name] = Leaf(tuple(leaf.shape), np.dtype(leaf.dtype))
        self.leaves: Mapping[str, Leaf] = arrays
        if not self.leaves:  # for some kinds of damage orbax only logs a warning
            raise ValueError(
                f'{self.path}: orbax finds no arrays in what was saved here; {_REMEDY}'
            )

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """Reads a tensor, or a part of it; see `Checkpoint`."""
        leaf = self.leaves[name]
        if self._held is None or self._held[0] != name:
            self._held = None  # freed before the next is read, not after
            self._held = name, self._restore(name).astype(leaf.dtype, copy=False)
        array = self._held[1]
        return array.copy() if part is None else part.of(array).copy()

    def _restore(self, name: str) -> np.ndarray:
        index = self._names.index(name)
        # A 0 asks for a leaf, a placeholder leaves it out.
        items = [getattr(ocp, 'PLACEHOLDER', 0)] * len(self._names)
        items[index] = 0
        restore_args = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(self._names)
        arguments = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(self._treedef, items),
            restore_args=jax.tree.unflatten(self._treedef, restore_args),
        )
        with _orbax(self.path, name) as checkpointer:
            restored = checkpointer.restore(self.path, args=arguments)
            return np.asarray(self._treedef.flatten_up_to(restored)[index])


@contextlib.contextmanager
def _orbax(path: Path, leaf: str = '') -> Iterator[Any]:
    """Yields a checkpointer whose errors are one line."""
    what = f'{leaf}, which was saved here' if leaf else 'what was saved here'
    with (
        orbax_errors(f'{path}: orbax cannot read {what}', _REMEDY),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        yield checkpointer
