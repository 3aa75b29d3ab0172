"""Files that others wrote, read with care: no waiting for pipes, JSON without surprises."""

import json
import stat
from pathlib import Path
from typing import Any


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
