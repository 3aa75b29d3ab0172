"""The groups of a block matrix, cut into equal chunks.

The groups of one chunk stand in the program one after another. If there are several chunks, a loop goes through them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

_LARGEST_CHUNK = 32  # groups


def scan_chunks(function: Callable[..., Any], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """Scans over chunks `[chunks, …]`; a single chunk needs no loop."""
    first, *_ = jax.tree.leaves(chunks)
    if len(first) > 1:
        return lax.scan(function, carry, chunks)
    only_chunk = jax.tree.map(lambda array: array[0], chunks)
    carry, result = function(carry, only_chunk)
    return carry, result[None]


def groups_in_chunk(groups: int) -> int:
    """The largest chunk that is allowed and divides the number of groups."""
    number = min(groups, _LARGEST_CHUNK)
    while groups % number:
        number -= 1
    return number


def chunks_of_groups(array: jax.Array) -> jax.Array:
    """`[groups, …]` as `[chunks, groups in a chunk, …]`."""
    groups, *rest = array.shape
    in_chunk = groups_in_chunk(groups)
    return array.reshape(-1, in_chunk, *rest)


def chunks_of_outputs(rows: jax.Array, groups: int) -> jax.Array:
    """Rows `[n, groups * out]` as `[chunks, n, outputs of a chunk]`."""
    count, outputs = rows.shape
    chunks = groups // groups_in_chunk(groups)
    cut = rows.reshape(count, chunks, outputs // chunks)
    return cut.transpose(1, 0, 2)
