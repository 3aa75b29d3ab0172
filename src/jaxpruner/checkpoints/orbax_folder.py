"""Reads orbax checkpoints one leaf at a time, with errors of one line: its libraries print hundreds of their own."""

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner import tree as tree_lib
from jaxpruner.checkpoints.reading import Leaf

_REMEDY = 'it is damaged or was copied in part; copy or save it anew'
_LONGEST_REASON = 300  # letters


class OrbaxFolder:
    """A folder, with `_METADATA` in it, to which orbax has saved a pytree; `'a/b/kernel'` is a leaf's name.

    Releases of orbax that know no placeholders restore the whole tree for each leaf.
    """

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        self.metadata: Mapping[str, str] = {}
        with _orbax(f'{self.path}: orbax cannot read what was saved here') as checkpointer:
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

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor; see `Checkpoint`."""
        leaf, index = self.leaves[name], self._names.index(name)
        # A 0 asks for a leaf, a placeholder leaves it out.
        items = [getattr(ocp, 'PLACEHOLDER', 0)] * len(self._names)
        items[index] = 0
        restore_args = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(self._names)
        arguments = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(self._treedef, items),
            restore_args=jax.tree.unflatten(self._treedef, restore_args),
        )
        what = f'{self.path}: orbax cannot read {name}, which was saved here'
        with _orbax(what) as checkpointer:
            restored = checkpointer.restore(self.path, args=arguments)
            return np.array(self._treedef.flatten_up_to(restored)[index], leaf.dtype)


@contextlib.contextmanager
def _orbax(what: str) -> Iterator[Any]:
    """Yields a checkpointer whose errors are one line."""
    with (
        orbax_errors(what, _REMEDY),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        yield checkpointer


@contextlib.contextmanager
def orbax_errors(
    what: str, remedy: str, error_class: type[Exception] = ValueError
) -> Iterator[None]:
    """Turns whatever orbax and tensorstore raise into one error of one line: what could not be done, why, the remedy.

    >>> with orbax_errors('a: orbax cannot read it', 'save it anew'):
    ...     raise KeyError('params')
    Traceback (most recent call last):
      ...
    ValueError: a: orbax cannot read it: 'params'; save it anew
    """
    _silence_closed_loops()
    disabled_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    except Exception as error:
        gc.collect()  # so that futures that nobody waits for complain now
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0][:_LONGEST_REASON]
        raise error_class(f'{what}: {reason}; {remedy}') from error
    finally:
        logging.disable(disabled_level)


@functools.cache
def _silence_closed_loops() -> None:
    """Drops what tensorstore's threads report to an event loop that has been closed.

    They may do so at any time after the first error, so the hook stays.
    """
    before = sys.unraisablehook

    def hook(ignored: 'sys.UnraisableHookArgs') -> None:
        error = ignored.exc_value
        if not isinstance(error, RuntimeError) or 'loop is closed' not in str(error):
            before(ignored)

    sys.unraisablehook = hook
