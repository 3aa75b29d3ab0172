"""A progress bar on the error stream, where somebody watches and rich is installed; else nothing, or some lines."""

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_SECONDS_BETWEEN_LINES = 10


@contextlib.contextmanager
def progress_bar(
    total: float | None, is_wanted: bool = True, in_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """Shows how much of a total is done, if stderr is a terminal; `None` is a total that is not known.

    Yields `show(description, done, arrays=None)`: what is being done, how much is behind it, and the arrays, if they
    are still being computed, to wait for.
    """
    if not (is_wanted and has_bar()):
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
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task('', total=total)

        def show(description: str, done: float, arrays: Any = None) -> None:
            if arrays is not None:
                import jax  # loads long, and --help of the commands need not wait

                jax.block_until_ready(arrays)
            progress.update(task, description=description, completed=done)

        yield show


def has_bar() -> bool:
    """Whether a progress bar that is wanted is shown."""
    return sys.stderr.isatty() and importlib.util.find_spec('rich') is not None


def progress_lines(total: float) -> Callable[..., None]:
    """Returns what `progress_bar` yields, but it prints a line to stderr, ten seconds after the last or later."""
    began = time.monotonic()
    printed = -math.inf

    def show(description: str, done: float, arrays: Any = None) -> None:
        nonlocal printed
        del arrays  # where they are still computed, the next line is late
        now = time.monotonic()
        if done < total and now - printed < _SECONDS_BETWEEN_LINES:
            return
        printed = now
        minutes, seconds = divmod(round(now - began), 60)
        print(
            f'{done / total:4.0%} after {minutes}:{seconds:02d} min: {description}',
            file=sys.stderr,
            flush=True,
        )

    return show
