"""Ctrl-C that is always heard."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

_SECONDS_UNTIL_AGAIN = 0.05


@contextlib.contextmanager
def heard_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python has dropped.

    Python ignores a `KeyboardInterrupt` inside `__del__`, or inside a callback of the garbage collector, of which JAX
    has one, and the program goes on.
    """
    before = sys.unraisablehook

    def repeat(ignored: 'sys.UnraisableHookArgs') -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            threading.Timer(_SECONDS_UNTIL_AGAIN, signal.raise_signal, (signal.SIGINT,)).start()
        else:
            before(ignored)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        if sys.unraisablehook is repeat:  # a hook that a library has set since stays
            sys.unraisablehook = before
