"""A model as a table: what each leaf has, what its mask keeps, and what that takes in memory."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import text_tables, utils
from jaxpruner import tree as tree_lib
from jaxpruner.text_tables import Column, with_prefix

_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('shape', overflow='fold'),
    Column('dtype', overflow='fold'),
    *(Column(heading, align='right') for heading in ('sparsity', 'kept', 'dense', 'packed')),
)


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A leaf of a model in numbers, or all of them together.

    >>> TableRow('w', (2, 2), 'float32', weights=4, kept=1, dense_bytes=16, packed_bytes=5).sparsity
    0.75
    """

    name: str
    shape: tuple[int, ...] | None  # None in the row of totals
    dtype: str  # empty in the row of totals
    weights: int
    kept: int  # weights that the mask keeps; without masks those that are not zero
    dense_bytes: int
    packed_bytes: int  # one bit a weight and the kept weights, or dense where that is less

    @property
    def sparsity(self) -> float:
        """The share of the weights that is not kept, 0 of no weights."""
        return 1 - self.kept / self.weights if self.weights else 0.0


@dataclasses.dataclass(frozen=True)
class SparsityTable:
    """The table that `tabulate` makes: `str` gives plain text of 80 columns.

    As text, three or more layers of equal shapes whose names differ in one number stand in one row,
    `'layers/{0-23}/kernel'`: with the range of their sparsities, and with sums of all else. `rows` has each leaf.

    >>> import jax.numpy as jnp
    >>> len(tabulate({'w': jnp.ones(2)}).rows)
    1
    """

    rows: tuple[TableRow, ...]

    @property
    def total(self) -> TableRow:
        """A row whose entries are the sums of their columns; its sparsity is that of all weights together."""
        return _sum(self.rows)

    def __iter__(self) -> Iterator[TableRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        return self.to_text(text_tables.WIDTH)

    def to_text(self, width: int) -> str:
        """Plain text that fits a width, in characters."""
        names = [row.name for row in self.rows]
        alike = [(row.shape, row.dtype) for row in self.rows]
        body = []
        for name, indices in text_tables.group_layers(names, alike):
            rows = [self.rows[i] for i in indices]
            shape = '×'.join(map(str, rows[0].shape or ())) or 'scalar'
            sparsity = text_tables.span([row.sparsity for row in rows], '{:.2%}'.format)
            body.append([name, shape, rows[0].dtype, sparsity, *_words(_sum(rows))])
        total = self.total
        last = ['total', f'{total.weights:,}', '', f'{total.sparsity:.2%}', *_words(total)]
        return text_tables.to_text(_COLUMNS, body, last, width)


def _sum(rows: Sequence[TableRow]) -> TableRow:
    columns = ('weights', 'kept', 'dense_bytes', 'packed_bytes')
    return TableRow(
        'total', None, '', *(sum(getattr(row, name) for row in rows) for name in columns)
    )


def _words(row: TableRow) -> list[str]:
    return [f'{row.kept:,}', with_prefix(row.dense_bytes, 'B'), with_prefix(row.packed_bytes, 'B')]


def tabulate(params: tree_lib.PyTree, masks: Any = None) -> SparsityTable:
    """Tabulates a model: each leaf with its shape, dtype, sparsity, kept weights and bytes.

    Args:
      params: any pytree of arrays; `None`, random keys and numbers of Python are skipped. Where masks are given, shapes
        (`jax.ShapeDtypeStruct`) will do.
      masks: a tree like the parameters of masks, packed or not, `None` where dense; or an optimizer state that holds
        them. Without masks, weights that are zero count as pruned.

    Returns:
      A table that prints as plain text of 80 columns. Its `rows` and its `total` hold the
      numbers. What is printed has one row for three or more equal layers, `'layers/{0-23}/kernel'`, with sums.

    Raises:
      ValueError: masks do not fit the parameters.
      TypeError: the numbers are not known yet: inside `jit`, or of shapes without masks.

    >>> import jax.numpy as jnp
    >>> params = {'encoder': {'bias': jnp.zeros(8), 'kernel': jnp.ones((16, 8))}}
    >>> masks = {'encoder': {'bias': None, 'kernel': jnp.eye(16, 8, dtype=jnp.uint8)}}
    >>> print(tabulate(params, masks))
    leaf            shape  dtype    sparsity  kept  dense  packed
    -------------------------------------------------------------
    encoder/bias    8      float32     0.00%     8   32 B    32 B
    encoder/kernel  16×8   float32    93.75%     8  512 B    48 B
    -------------------------------------------------------------
    total           136               88.24%    16  544 B    80 B
    """
    numbers = jax.tree.map(utils.array_of_numbers, params)
    paths, leaves, treedef = tree_lib.flatten_with_paths(numbers)
    counted: list[Any] = leaves
    if masks is not None:
        # Those of several pruners.
        trees = [state.masks for state in sparse_state_lib.sparse_states(masks)] or [masks]
        of_trees = zip(*(tree_lib.leaves_like(treedef, tree) for tree in trees), strict=True)
        counted = [next((m for m in each if m is not None), None) for each in of_trees]
    rows = []
    for path, leaf, array in zip(paths, leaves, counted, strict=True):
        name = tree_lib.path_string(path)
        if tree_lib.is_traced(array) or isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(
                f'{name}: a table needs numbers that are known, got {type(array).__name__}; call tabulate outside jit, '
                'and give masks where parameters are shapes alone (summarize_sparsity counts in jit)'
            )
        weights = math.prod(leaf.shape)
        if array is None:
            count = weights
        elif masks is None:
            count = int(utils.count_nonzero(leaf))
        else:
            mask = sparse_state_lib.unpack_masks({name: array}, {name: leaf})[name]
            count = int(sparse_state_lib.kept_weights(mask))
        itemsize = leaf.dtype.itemsize
        sizes = weights * itemsize, utils.packed_bytes(weights, count, itemsize)
        rows.append(TableRow(name, tuple(leaf.shape), str(leaf.dtype), weights, count, *sizes))
    return SparsityTable(tuple(rows))
