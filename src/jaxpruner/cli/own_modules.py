"""Modules of the user's own, with algorithms, sparsity types or a graph, which commands import by name."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any


def import_modules(names: Sequence[str], option: str = 'modules') -> None:
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
                f'{option}: {name!r} is no name of a module; write mine for the file mine.py, '
                'package.mine for package/mine.py'
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f'{option}: {name!r} cannot be imported: {error}; modules are looked for in {here}, on PYTHONPATH and '
                'among what is installed'
            ) from error


def load_object(name: str, option: str) -> Any:
    """Loads what stands under a name in a module, such as `mine:graph`; a function is called for it.

    Raises:
      ValueError: the name is none of that form, or nothing stands there.

    >>> load_object('jaxpruner.api:all_algorithm_names', 'graph')[0]
    'no_prune'
    """
    module, colon, attribute = name.partition(':')
    if not colon or not attribute.isidentifier():
        raise ValueError(
            f'{option}: {name!r} names nothing in a module; write mine:graph for graph in mine.py'
        )
    import_modules([module], option)
    found = getattr(sys.modules[module], attribute, None)
    if found is None:
        raise ValueError(f'{option}: the module {module} has no {attribute}')
    return found() if callable(found) else found
