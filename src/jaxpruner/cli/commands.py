"""The commands of `jaxpruner`: a row here, and a file with a frozen dataclass.

Its fields are the options, and `run` does the work. The file is loaded when the command is called, so that each command
needs its own extra alone, and JAX only when it runs.
"""

import importlib
from typing import NamedTuple


class Command(NamedTuple):
    """A row of the table of commands."""

    module: str
    class_name: str
    arguments: str  # those without a flag, for the list of commands
    words: str  # what it does, for the same list
    extra: str  # installs what it needs

    def load(self) -> type:
        """Returns the dataclass of its options."""
        return getattr(importlib.import_module(self.module), self.class_name)


_ROWS = (
    ('demo', '', 'train a small network dense and pruned; two minutes', 'baselines'),
    ('run', 'WORKLOAD', 'train a model with one algorithm', 'baselines'),
    ('compare', 'WORKLOAD', 'train it with each algorithm', 'baselines'),
    ('inspect', 'CHECKPOINT', 'sparsity, structure and bytes, leaf by leaf', 'checkpoint'),
    ('prune', 'CHECKPOINT', 'write a checkpoint with its smallest weights removed', 'checkpoint'),
    ('pack', 'CHECKPOINT', 'write a checkpoint without its zeros', 'checkpoint'),
    ('unpack', 'PACKED', 'write a packed checkpoint as it was', 'checkpoint'),
    ('table', 'FOLDERS', 'results of runs as a table', 'cli'),
    ('order', 'FOLDERS', "their order against the original's table", 'cli'),
    ('plot', 'FOLDERS', 'results of runs as images', 'plot'),
)

COMMANDS = {name: Command(f'jaxpruner.cli.{name}', name.title(), *row) for name, *row in _ROWS}


def without_extra(what: str, extra: str, error: ModuleNotFoundError) -> ImportError:
    """Returns an error that names the extra to install, or a mistake of this package as it is."""
    if error.name is None or error.name.partition('.')[0] == 'jaxpruner':
        return error
    extras = ','.join(dict.fromkeys(('cli', extra)))
    return ImportError(
        f"{what} needs {error.name}, which is not installed: pip install 'jaxpruner[{extras}]'"
    )
