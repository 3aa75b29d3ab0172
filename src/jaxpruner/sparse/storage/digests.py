"""Digests of what a file stores. When the file is read, they show whether it is damaged."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

NO_DIGEST = '0' * 8  # as long as any


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The CRC-32 of the bytes of all arrays, in the order of their names: eight hexadecimal digits.

    >>> digest_of({'values': np.ones(2, np.float32)})
    'd5065190'
    """
    checksum = 0
    for _, array in sorted(arrays.items()):
        numbers = np.ascontiguousarray(array).reshape(-1)
        checksum = zlib.crc32(numbers.view(np.uint8).data, checksum)
    return f'{checksum:08x}'


def digest_of_table(table: Any) -> str:
    """The CRC-32 of a table of JSON, whatever its order and spacing: eight hexadecimal digits.

    >>> digest_of_table({'a': 1, 'b': []}) == digest_of_table({'b': [], 'a': 1})
    True
    """
    text = json.dumps(table, sort_keys=True)
    return f'{zlib.crc32(text.encode()):08x}'
