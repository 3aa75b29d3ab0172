"""What is ranked: scores, lazy or not, and their rows.

Each row of an array `[rows, …]` is ranked for itself: a layer of a stacked leaf, or the whole leaf as its only row.
Rows stand in tables that have a row for every row of all arrays (`Rows`). A loop over the rows of many arrays, one
program for all, reads them by a cursor (`RowCursor`).

Lazy scores are a function of the weights, computed wherever they are read. The scores of a model as arrays take as much
memory as its weights. A pass that computes them as it reads takes none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control

# The most scores of a row that may be copied.
LONGEST_BUFFER = 2**19


@functools.partial(jax.tree_util.register_dataclass, data_fields=['weights'], meta_fields=['of'])
@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The lazy scores `of(weights)`; what moves weights moves them, too (`jax.tree.map`).

    Attributes:
      weights: float array, or a tuple that begins with one. Its other arrays have the same shape, flags for instance,
        and are moved to the devices of the first. Floats of 8 bits are scored at once: they are ranked as float32.
      of: computes each weight's score from that array or tuple, elementwise, in the weight's dtype; hashable.

    >>> import jax.numpy as jnp
    >>> scores = Scores(jnp.array([[-2.0, 1.0]]), jnp.abs)
    >>> scores.shape, jax.tree.map(jnp.ravel, scores).shape, read(scores).tolist()
    ((1, 2), (2,), [[2.0, 1.0]])
    """

    weights: jax.Array | tuple[Any, ...]
    of: Callable[[Any], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""
        return self._array.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of scores."""
        return math.prod(self.shape)

    @property
    def _array(self) -> jax.Array:
        return jax.tree.leaves(self.weights)[0]


# Scores, lazy or not.
ScoresLike = jax.Array | Scores


def read(scores: ScoresLike) -> jax.Array:
    """Computes lazy scores; returns an array as it is.

    >>> import jax.numpy as jnp
    >>> read(jnp.array([1.0])).tolist(), read(Scores(jnp.array([-1.0]), jnp.abs)).tolist()
    ([1.0], [1.0])
    """
    if isinstance(scores, Scores):
        return scores.of(scores.weights)
    return scores


def flat_rows(array: ScoresLike) -> ScoresLike:
    """Views an array `[rows, …]` as rows `[rows, size]`, or as its only row `[size]`."""
    row_count = array.shape[0]
    # Under vmap XLA would copy an array that has an axis of length 1 behind that of the batch.
    shape = (-1,) if row_count == 1 else (row_count, -1)
    return jax.tree.map(lambda leaf: leaf.reshape(shape), array)


def sizes_of_rows(arrays: Sequence[ScoresLike]) -> list[int]:
    """Lists how many scores each row of each array has."""
    sizes = []
    for array in arrays:
        row_count = array.shape[0]
        sizes += [array.size // row_count] * row_count
    return sizes


@functools.partial(jax.tree_util.register_dataclass, data_fields=['begin'], meta_fields=['count'])
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of an array in a table of the rows of all arrays."""

    begin: jax.Array | None  # `None`: the table has these rows alone
    count: int

    def take(self, table: jax.Array) -> jax.Array:
        """Takes these rows of a table `[all rows, …]`."""
        if self.begin is None:
            return table
        return lax.dynamic_slice_in_dim(table, self.begin, self.count)


def rows_of(arrays: Sequence[ScoresLike]) -> list[Rows]:
    """Finds where the rows of each array `[rows, …]` stand in tables of the rows of all arrays.

    The compiler does not see where they begin. XLA compiles equal programs once, and the programs of arrays of one
    shape differ in this begin alone. `control.hide_constants` says how long it takes to compile each of them.
    """
    counts = [array.shape[0] for array in arrays]
    if len(counts) == 1:
        return [Rows(None, counts[0])]
    ends = np.cumsum(counts, dtype=np.uint32)
    known_begins = ends - np.array(counts, np.uint32)
    begins = control.hide_constants(known_begins, arrays[0])
    rows = []
    for i, count in enumerate(counts):
        rows.append(Rows(begins[i], count))
    return rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['scores', 'rows', 'threshold_rows'],
    meta_fields=['per_device'],
)
@dataclasses.dataclass(frozen=True)
class RankedArray:
    """An array, and its rows in tables."""

    scores: ScoresLike  # floats [rows, …]
    rows: Rows
    threshold_rows: Rows  # in tables of thresholds, which may have one row for all arrays
    per_device: bool = False  # whether devices that share the array count their own shards

    def thresholds(self, table: jax.Array) -> jax.Array:
        """Takes the thresholds of its rows from a table `[rows, columns]`, in its own dtype."""
        own_rows = self.threshold_rows.take(table)
        return own_rows.astype(self.scores.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['sources', 'source', 'row', 'size'],
    meta_fields=['longest', 'prefixes'],
)
@dataclasses.dataclass(frozen=True)
class RowCursor:
    """Points to one row of one of several sources; which one is known when the program runs.

    A source is an array. After `copied` the sources are one buffer, each read up to another length.
    """

    # Each source as its only row [size], or as rows [rows, size].
    sources: Sequence[ScoresLike]
    source: jax.Array  # which of them
    row: jax.Array  # which row of that source
    size: jax.Array  # how many scores the row has
    longest: int  # how many scores a row has at most
    # For each source the number of scores of a row that are read; `None`: all.
    prefixes: tuple[int, ...] | None = None

    @classmethod
    def at_row(
        cls,
        arrays: Sequence[ScoresLike],
        row: jax.Array | int,
        counter: jnp.dtype,
    ) -> 'RowCursor':
        """Points to a row by its index among the rows of all arrays `[rows, …]`."""
        array_of_row: list[int] = []
        row_in_array: list[int] = []
        for i, array in enumerate(arrays):
            row_count = array.shape[0]
            array_of_row += [i] * row_count
            row_in_array += range(row_count)
        sizes = sizes_of_rows(arrays)
        return cls(
            sources=[flat_rows(array) for array in arrays],
            source=look_up(np.array(array_of_row, np.int32), row),
            row=look_up(np.array(row_in_array, np.int32), row),
            size=look_up(np.array(sizes, counter), row),
            longest=max(sizes),
        )

    def apply_to_row(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Calls a function of the row `[size]` and inputs; the result has one shape, whichever source it is.

        The function is in the program once for each source. What is computed from its results is there once for all.
        """

        def of_source(i: int) -> Callable[..., Any]:
            prefix = None if self.prefixes is None else self.prefixes[i]

            def of_row(
                sources: Sequence[Any],
                row: jax.Array,
                *inputs: Any,
            ) -> Any:
                return function(_row(sources[i], row, prefix), *inputs)

            return of_row

        if len(self.sources) == 1:
            of_only_source = of_source(0)
            return of_only_source(self.sources, self.row, *inputs)
        branches = [of_source(i) for i in range(len(self.sources))]
        return lax.switch(self.source, branches, self.sources, self.row, *inputs)

    def copied(
        self,
        dtype: jnp.dtype,
        lengths: Sequence[int],
        length_index: jax.Array,
    ) -> 'RowCursor':
        """Copies the scores of the row to a buffer, padded with NaN.

        Args:
          dtype: the buffer's.
          lengths: how much of the buffer may be read, falling; the first is its own length.
          length_index: which of them is read for this row.
        """
        length = lengths[0]
        buffer = self.apply_to_row(functools.partial(_padded, length, dtype))
        return RowCursor(
            sources=[buffer] * len(lengths),
            source=length_index,
            row=jnp.int32(0),
            size=self.size,
            longest=length,
            prefixes=tuple(lengths),
        )


def look_up(table: np.ndarray, row: jax.Array | int) -> jax.Array:
    """Finds what a table of constants says of a row."""
    if np.all(table == table[0]):
        return jnp.asarray(table[0])
    return lax.dynamic_index_in_dim(jnp.asarray(table), row, keepdims=False)


def _row(
    rows: ScoresLike,
    row: jax.Array,
    prefix: int | None,
) -> ScoresLike:
    """Takes one of several rows, or the only one, and of it the scores that are read."""

    def take(leaf: jax.Array) -> jax.Array:
        if leaf.ndim > 1:
            leaf = lax.dynamic_index_in_dim(leaf, row, keepdims=False)
        return leaf if prefix is None else leaf[:prefix]

    return jax.tree.map(take, rows)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all arrays of one shape
def _padded(
    length: int,
    dtype: jnp.dtype,
    row: ScoresLike,
) -> jax.Array:
    scores = read(row).astype(dtype)
    padding = (0, length - row.size)
    return jnp.pad(scores, padding, constant_values=jnp.nan)
