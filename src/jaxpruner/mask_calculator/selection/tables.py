"""Tables of what is known of all rows of all arrays, and the part of them that each array needs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def split(table: jax.Array, rows: Sequence[int]) -> list[jax.Array]:
    """The parts of a table `[all rows, columns]` with so many rows each.

    >>> [part.tolist() for part in split(jnp.array([[1], [2], [3]]), [1, 2])]
    [[[1]], [[2], [3]]]
    """
    if len(rows) == 1:
        return [table]

    def parts(table: jax.Array) -> list[jax.Array]:
        return jnp.split(table, np.cumsum(rows)[:-1])

    if jax.default_backend() != 'cpu':
        return parts(table)
    # XLA fuses nothing across the border of a branch. Fused with what makes the table or with what reads a part, each
    # part would be several programs to compile; in a branch it is the same one wherever a table is split. Both branches
    # do it: a condition that is always true would be seen through, or would keep equal selections from becoming one.
    return lax.cond(table[0, 0] == 0, parts, lambda table: parts(table), table)


def wide(column: jax.Array, columns: int) -> jax.Array:
    """A table of equal columns: one of the width of others is split by the program that splits these.

    >>> wide(jnp.array([1, 2]), 3).tolist()
    [[1, 1, 1], [2, 2, 2]]
    """
    return jnp.broadcast_to(column[:, None], (*column.shape, columns))
