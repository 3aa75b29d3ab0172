"""A progress bar over the tensors of a checkpoint."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from jaxpruner.core.progress import progress_bar

if TYPE_CHECKING:
    from jaxpruner.checkpoints import Leaf


@contextlib.contextmanager
def leaf_progress(
    leaves: 'Mapping[str, Leaf]', wanted: bool = True
) -> 'Iterator[Callable[[str, Leaf], None]]':
    """Shows on stderr which tensor is being read, and how many bytes are behind it.

    Args:
      leaves: all tensors.
      wanted: whether to show anything, if stderr is a terminal.

    Returns:
      A context with a function to be called with name and leaf of each tensor before its turn.

    >>> with leaf_progress({}, wanted=False) as on_leaf:
    ...     pass
    """
    with progress_bar(sum(leaf.bytes for leaf in leaves.values()), wanted, in_bytes=True) as show:
        before = 0

        def on_leaf(name: str, leaf: 'Leaf') -> None:
            nonlocal before
            show(name, before)
            before += leaf.bytes

        yield on_leaf
