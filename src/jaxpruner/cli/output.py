"""Where a command's tables go: as wide as COLUMNS says, else as the terminal, else 80 columns."""

import os
import sys

from jaxpruner import text_tables


def width() -> int:
    """Returns how many columns a table may have."""
    columns = os.environ.get('COLUMNS', '')
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or text_tables.WIDTH
    except (OSError, ValueError, AttributeError):  # it goes to a file, to a pipe, or into a test
        return text_tables.WIDTH


def printable(text: str) -> str:
    """Escapes letters that would move the cursor or change colours.

    >>> printable('kernel' + chr(27)) == 'kernel' + chr(92) + 'x1b'
    True
    """
    return ''.join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def print_rich(*renderables: object) -> None:
    """Prints what rich lays out."""
    import rich.console

    class Console(rich.console.Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program with an error; `main` ends it quietly

    Console(width=width(), highlight=False).print(*renderables)
