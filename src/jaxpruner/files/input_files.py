"""Files that others wrote, read with care: no waiting for pipes, JSON without surprises, configurations as dicts."""

import dataclasses
import json
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_READERS = {'.toml': tomllib.loads, '.json': json.loads}


def check_file(path: Path) -> None:
    """Refuses anything but a file or a link to one, before opening it could wait forever.

    Raises:
      OSError: there is nothing, or no file, or it cannot be reached; the error names it.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f'{path} is a folder, a pipe or a device where a file belongs; name a file')


def read_file(path: Path) -> bytes:
    """Reads a whole file; an `OSError` names it."""
    check_file(path)
    return path.read_bytes()


def parse_json(content: bytes | bytearray) -> Any:
    """Parses JSON in which no key is given twice.

    Raises:
      ValueError: it is no UTF-8 or no JSON, a key is given twice, or it is nested deeper than anything sensible.
    """

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError(f'a key is given twice in {[key for key, _ in pairs][:9]}')
        return table

    try:
        return json.loads(content.decode(), object_pairs_hook=without_repetition)
    except RecursionError:
        raise ValueError('its values are nested too deep') from None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a .toml or .json file that holds a table.

    Raises:
      ValueError: another ending, no valid TOML or JSON, or no table.
      FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if path.suffix not in _READERS:
        raise ValueError(f'{path}: a configuration file must end in .toml or .json')
    try:
        content = _READERS[path.suffix](read_file(path).decode())
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
        return read_config(config)
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
