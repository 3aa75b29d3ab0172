"""Tables with a row for each row of all arrays, and the part of them that each array needs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def split(table: jax.Array, rows: Sequence[int]) -> list[jax.Array]:
    """Splits a table `[all rows, columns]` into parts with so many rows each."""
    if len(rows) == 1:
        return [table]

    def parts(table: jax.Array) -> list[jax.Array]:
        return jnp.split(table, np.cumsum(rows)[:-1])

    if jax.default_backend() != 'cpu':
        return parts(table)
    # Read this as `parts(table)`; the branches save time to compile. XLA fuses nothing across the border of a branch.
    # Fused with what makes the table or with what reads a part, each part would be several programs; in a branch it is
    # the same one wherever a table is split. Both branches do the same, since a condition that is always true would be
    # removed, or would keep equal selections from being merged.
    return lax.cond(table[0, 0] == 0, parts, lambda table: parts(table), table)


def widen(column: jax.Array, columns: int) -> jax.Array:
    """Repeats a column: tables of one width are split by one program."""
    return jnp.broadcast_to(column[:, None], (*column.shape, columns))
