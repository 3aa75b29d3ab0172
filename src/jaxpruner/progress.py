"""A progress bar on the error stream, where somebody watches and rich is installed."""

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any


@contextlib.contextmanager
def progress_bar(total: float | None, is_wanted: bool = True) -> Iterator[Callable[..., None]]:
    """Shows how much of a total is done, if stderr is a terminal; `None` is a total that is not known.

    Yields `show(description, done, arrays=None)`: what is being done, how much is behind it, and the arrays, if they
    are still being computed, to wait for.
    """
    if not (is_wanted and sys.stderr.isatty() and importlib.util.find_spec('rich')):
        # In older releases a bar that is not shown would still end its line.
        yield lambda description, done, arrays=None: None
        return
    import rich.console
    import rich.progress

    columns = (
        rich.progress.TextColumn('{task.description:16}', markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task('', total=total)

        def show(description: str, done: float, arrays: Any = None) -> None:
            if arrays is not None:
                import jax  # loads long, and --help of the commands need not wait

                jax.block_until_ready(arrays)
            progress.update(task, description=description, completed=done)

        yield show


@contextlib.contextmanager
def leaf_progress(leaves: Collection[str], is_wanted: bool) -> Iterator[Callable[[str], None]]:
    """Shows which leaf is being read; yields a function to call with its name before it is."""
    with progress_bar(len(leaves), is_wanted) as show:
        behind = itertools.count()
        yield lambda name: show(name, next(behind))
