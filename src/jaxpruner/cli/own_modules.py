"""Modules of the user's own that register algorithms, which `jaxpruner run` and `compare` import by name."""

import importlib
import os
import sys
from collections.abc import Sequence


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that are installed, or that lie in the working directory.

    Raises:
      ValueError: there is no such module, or it needs one that is not there.

    >>> import_modules(['jaxpruner.algorithms'])
    """
    here = os.getcwd()
    # A command that is installed looks for modules beside itself, not where it is called.
    if names and here not in sys.path:
        sys.path.insert(0, here)
    for name in names:
        if name.endswith('.py') or not all(map(str.isidentifier, name.split('.'))):
            raise ValueError(
                f'modules: {name!r} is no name of a module; write mine for the file mine.py, '
                'package.mine for package/mine.py'
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f'modules: {name!r} cannot be imported: {error}; modules are looked for in {here}, on PYTHONPATH and '
                'among what is installed'
            ) from error
