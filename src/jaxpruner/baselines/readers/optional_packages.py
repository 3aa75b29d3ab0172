"""Packages that readers need, loaded when a reader is used."""

import importlib
from typing import Any


def imported(name: str, use: str) -> Any:
    """Imports a module, or says which package its use needs.

    >>> imported('no_such_module', 'numbers')
    Traceback (most recent call last):
    ...
    ImportError: numbers need no_such_module, which is not installed: pip install 'jaxpruner[readers]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition('.')[0]
        raise ImportError(
            f"{use} need {package}, which is not installed: pip install 'jaxpruner[readers]'"
        ) from error
