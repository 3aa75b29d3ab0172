"""The pages of the command line, from what its parser prints."""

import contextlib
import io
from collections.abc import Sequence

from jaxpruner.cli import main as cli


def printed(command_lines: Sequence[str]) -> str:
    """Runs each line, such as `jaxpruner prune --help`, and shows it with what it printed."""
    blocks = []
    for line in command_lines:
        program, *arguments = line.split()
        if program != 'jaxpruner' or '--help' not in arguments:
            raise ValueError(f'a help page is printed by `jaxpruner … --help`, not by {line!r}')
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            cli.main(arguments)
        blocks.append(f'```text\n$ {line}\n{output.getvalue().rstrip()}\n```')
    return '\n\n'.join(blocks)
