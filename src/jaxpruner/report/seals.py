"""Checksums: a text that ends with its own, and those of files that belong to it."""

import functools
import hashlib
import os
from pathlib import Path

_KEY = b' "checksum": "'
_END = b'"\n}\n'


def seal(text: str) -> bytes:
    """Puts the SHA-256 of all that stands before it at the end of a JSON table.

    Args:
      text: the table, with a line for each key and none of the name `checksum`.

    >>> import json
    >>> len(json.loads(seal('{"a": 1}'))['checksum'])
    64
    """
    head = text.rstrip().removesuffix('}').rstrip().encode() + b',\n'
    return head + _KEY + _digest(head) + _END


def is_sealed(content: bytes) -> bool:
    """Says whether a text ends with a checksum.

    Raises:
      ValueError: the checksum is another one's: something has changed.

    >>> is_sealed(seal('{"a": 1}')), is_sealed(b'{"a": 1}')
    (True, False)
    """
    head, key, checksum = content.rpartition(_KEY)
    if not key:
        return False
    if checksum != _digest(head) + _END:
        raise ValueError('its checksum does not match: it has changed since it was written')
    return True


def checksum(path: Path) -> str:
    """The SHA-256 of a file, read once as long as its time and size stay as they are.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, 'a').write_bytes(b'')
    ...     checksum(Path(folder, 'a'))[:8]
    'e3b0c442'
    """
    about = os.stat(path)
    return _checksum(path.absolute(), about.st_mtime_ns, about.st_size, about.st_ino)


@functools.lru_cache(maxsize=4096)
def _checksum(path: Path, *about: int) -> str:
    del about
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _digest(head: bytes) -> bytes:
    return hashlib.sha256(head).hexdigest().encode()
