"""Files that others wrote, read with care: no waiting for pipes, one error that names the file whatever is in it."""

import json
import stat
from pathlib import Path
from typing import Any

from jaxpruner.files.system_errors import errors_named


def check_file(path: Path) -> None:
    """Refuses anything but a file or a link to one, before opening it could wait forever.

    Raises:
      OSError: there is nothing, or no file, or it cannot be reached; the error names it.
    """
    with errors_named(path):
        mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f'{path} is a folder where a file belongs; name the file')
    if not stat.S_ISREG(mode):
        raise OSError(f'{path} is a pipe, a socket or a device; name a file')


def read_file(path: Path) -> bytes:
    """Reads a whole file; an `OSError` names it."""
    check_file(path)
    with errors_named(path):
        return path.read_bytes()


def parse_json(content: bytes | bytearray) -> Any:
    """Parses JSON in which no key is given twice.

    Raises:
      ValueError: it is no UTF-8 or no JSON, a key is given twice, or it is nested deeper than anything sensible.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_without_repetition)
    except RecursionError:
        raise ValueError('its values are nested too deep') from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f'the key {key!r} is given twice')
        table[key] = value
    return table
