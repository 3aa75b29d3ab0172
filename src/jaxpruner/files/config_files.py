"""Configurations of all kinds, also TOML and JSON files, become dicts."""

import dataclasses
import json
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from jaxpruner.files import input_files

_READERS = {'.toml': tomllib.loads, '.json': json.loads}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a .toml or .json file that holds a table.

    Raises:
      ValueError: another ending, no valid TOML or JSON, or no table.
      FileNotFoundError: there is no such file.
    """
    path = pathlib.Path(path)
    if path.suffix not in _READERS:
        raise ValueError(f'{path}: a configuration file must end in .toml or .json')
    try:
        content = _READERS[path.suffix](input_files.read_file(path).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} is no valid {path.suffix[1:].upper()}: {error}') from error
    if not isinstance(content, dict):
        raise ValueError(f'{path} must hold a table of keys, got {type(content).__name__}')
    return content


def as_dict(config: Any) -> dict[Any, Any]:
    """Returns the keys and values of a configuration.

    It is a mapping (also a `ConfigDict`), a dataclass, a namespace, or the path of a TOML or JSON file.

    Raises:
      TypeError: it is none of these.
      ValueError: a value must be filled before it is read, or the file is none.
      FileNotFoundError: there is no such file.

    >>> as_dict({'algorithm': 'set'})
    {'algorithm': 'set'}
    """
    if isinstance(config, (str, os.PathLike)):
        return read(config)
    # A ConfigDict is no Mapping, but has its methods.
    if isinstance(config, Mapping) or (hasattr(config, 'keys') and hasattr(config, '__getitem__')):
        table = {}
        for key in config:
            try:
                value: Any = config[key]
            except Exception as error:  # a placeholder of a ConfigDict that must be filled
                raise ValueError(f'config key {key!r} has no value: {error}') from error
            if hasattr(value, 'to_dict') and not isinstance(value, Mapping):
                value = value.to_dict()
            table[key] = value
        return table
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if 'algorithm' in getattr(config, '__dict__', {}):  # a namespace
        return dict(vars(config))
    raise TypeError(
        f'a configuration is a mapping, a dataclass, or the path of a TOML or JSON file; got {config!r}'
    )
