"""Checksums: a text that ends with its own, and those of files that belong to it."""

import functools
import hashlib
import os
from pathlib import Path

_KEY = b' "checksum": "'
_END = b'"\n}\n'


def seal(text: str) -> bytes:
    """Appends the key `checksum` to a JSON object of one key a line: the SHA-256 of all that stands before it."""
    head = text.rstrip().removesuffix('}').rstrip().encode() + b',\n'
    return head + _KEY + _digest(head) + _END


def is_sealed(content: bytes) -> bool:
    """Whether a text ends with a checksum; raises ValueError where the checksum does not match the text."""
    head, key, checksum = content.rpartition(_KEY)
    if not key:
        return False
    if checksum != _digest(head) + _END:
        raise ValueError('its checksum does not match: it has changed since it was written')
    return True


def checksum(path: Path) -> str:
    """Computes the SHA-256 of a file. The file is read again only if its time, size or inode has changed."""
    status = os.stat(path)
    return _checksum(path.absolute(), status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=4096)
def _checksum(path: Path, *status: int) -> str:
    del status
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _digest(head: bytes) -> bytes:
    return hashlib.sha256(head).hexdigest().encode()
