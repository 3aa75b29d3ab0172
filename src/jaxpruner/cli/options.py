"""Types of arguments that several commands have, and the modules that some of them import."""

import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

CheckpointPath = Annotated[Path, Positional, arg(metavar='CHECKPOINT')]
Folders = Annotated[tuple[Path, ...], Positional, arg(metavar='FOLDER')]
# Several values, all at once or each with the option before it.
Values = UseAppendAction[tuple[tuple[str, ...], ...]]


def flat(values: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Returns the values of an option that may be repeated."""
    return tuple(itertools.chain(*values))


def import_modules(names: tuple[tuple[str, ...], ...]) -> None:
    """Imports modules of the user's own, which are installed or lie in the working directory."""
    # A command that is installed looks for modules beside itself, not where it is called.
    sys.path.insert(0, os.getcwd())
    for name in flat(names):
        importlib.import_module(name)
