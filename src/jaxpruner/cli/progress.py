"""A progress bar over the tensors of a checkpoint; none where nobody watches."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from jaxpruner.checkpoints import Leaf


@contextlib.contextmanager
def leaf_progress(leaves: 'Mapping[str, Leaf]', wanted: bool = True) -> 'Iterator[Callable[[str, Leaf], None]]':
    """Shows on stderr which tensor is being read, and how many bytes are behind it.

    Args:
      leaves: all tensors.
      wanted: whether to show anything, if stderr is a terminal.

    Returns:
      A context with a function to be called with name and leaf of each tensor before its turn.

    >>> with leaf_progress({}, wanted=False) as on_leaf:
    ...     pass
    """
    if not (wanted and sys.stderr.isatty()):  # a bar that is not shown would still end its line, in older releases
        yield lambda name, leaf: None
        return
    columns = (TextColumn('{task.description}', markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task('', total=sum(leaf.bytes for leaf in leaves.values()))
        before = 0

        def on_leaf(name: str, leaf: 'Leaf') -> None:
            nonlocal before
            progress.update(task, description=name, advance=before)
            before = leaf.bytes

        yield on_leaf
