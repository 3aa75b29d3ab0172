"""Where a command's tables go: as wide as the terminal, or wide enough where there is none."""

import sys

import rich.console

# Of a file or a pipe: long names and tables of nine algorithms still stand in one line.
_WIDTH_IN_A_FILE = 200


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the program with an error; `main` ends it quietly


def console() -> rich.console.Console:
    """A console on the standard output.

    >>> console().width > 0
    True
    """
    return _Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_FILE, highlight=False)
