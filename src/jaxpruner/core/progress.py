"""A progress bar on the error stream, where somebody watches and rich is installed; else nothing."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress_bar(
    total: float | None, wanted: bool = True, in_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """Shows how far something is, if stderr is a terminal.

    Args:
      total: how much there is to do; `None` where that is not known.
      wanted: whether to show anything.
      in_bytes: whether bytes are counted.

    Returns:
      A context with a function of what is being done, how much is behind it, and (if it is still being computed) the
      arrays that have to be there until that is so.

    >>> with progress_bar(2, wanted=False) as show:
    ...     show('batches', 1)
    """
    if not (wanted and sys.stderr.isatty() and importlib.util.find_spec('rich')):
        # In older releases a bar that is not shown would still end its line.
        yield lambda description, done, arrays=None: None
        return
    import rich.console
    import rich.progress

    columns = (
        rich.progress.TextColumn('{task.description:16}', markup=False),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn() if in_bytes else rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=rich.console.Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task('', total=total)

        def show(description: str, done: float, arrays: Any = None) -> None:
            if arrays is not None:
                import jax  # which --help of the commands need not wait for

                jax.block_until_ready(arrays)
            progress.update(task, description=description, completed=done)

        yield show
