"""Configuration files: TOML and JSON become dicts."""

import json
import os
import pathlib
import tomllib
from typing import Any

from jaxpruner import input_files

_READERS = {'.toml': tomllib.loads, '.json': json.loads}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a TOML or JSON file that holds a table.

    Args:
      path: a file whose name ends in .toml or .json.

    Returns:
      Its content.

    Raises:
      ValueError: another ending, no valid TOML or JSON, or no table.
      FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile('w', suffix='.toml') as file:
    ...     _ = file.write('sparsity = 0.5')
    ...     file.flush()
    ...     read(file.name)
    {'sparsity': 0.5}
    """
    path = pathlib.Path(path)
    if path.suffix not in _READERS:
        raise ValueError(f'{path}: a configuration file must end in .toml or .json')
    try:
        content = _READERS[path.suffix](input_files.read_file(path).decode())
    except RecursionError:
        raise ValueError(f'{path} is no valid {path.suffix[1:].upper()}: it is nested too deep') from None
    except ValueError as error:  # both parsers' errors are ValueErrors
        raise ValueError(f'{path} is no valid {path.suffix[1:].upper()}: {error}') from error
    if not isinstance(content, dict):
        raise ValueError(f'{path} must hold a table of keys, got {type(content).__name__}')
    return content
