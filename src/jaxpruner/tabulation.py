"""A model as a table: what each leaf has, what its mask keeps, and what that takes in memory."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import text_tables, utils
from jaxpruner import tree as tree_lib
from jaxpruner.text_tables import Column

if TYPE_CHECKING:
    import rich.table

_MISSING = '-'
_PREFIXES = ('', 'k', 'M', 'G', 'T', 'P')
_DECIMAL_STEP = 1000
_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('shape', overflow='fold'),
    Column('dtype', overflow='fold'),
    Column('sparsity', align='right'),
    Column('kept', align='right'),
    Column('dense', align='right'),
    Column('packed', align='right'),
)
_SPARSITY = 3  # its column
_FLOPS_COLUMN = Column('FLOPs', align='right')


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
    flops: int | float | None = None  # of the dense leaf; None where no graph tells

    @property
    def sparsity(self) -> float:
        """The share of the weights that is not kept, 0 of no weights."""
        return 1 - self.kept / self.weights if self.weights else 0.0


@dataclasses.dataclass(frozen=True)
class SparsityTable:
    """The table that `tabulate` makes: `str` gives plain text of 80 columns, rich renders it in colour.

    As text, three or more layers of equal shapes whose names differ in one number stand in one row,
    `'layers/{0-23}/kernel'`: with the range of their sparsities, and with sums of all else. `rows` has each leaf.

    >>> len(tabulate({'w': jnp.ones(2)}).rows)
    1
    """

    rows: tuple[TableRow, ...]
    has_flops: bool = False

    @property
    def total(self) -> TableRow:
        """A row whose entries are the sums of their columns; its sparsity is that of all weights together."""
        return _sum(self.rows, 'total', None, '', self.has_flops)

    def to_text(self, width: int = text_tables.WIDTH) -> str:
        """Lays the table out as plain text with lines of at most `width` characters."""
        total = self._texts(self.total)
        return text_tables.to_text(self._columns(), self._text_rows(), total=total, width=width)

    def __iter__(self) -> Iterator[TableRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> 'rich.table.Table':
        import rich.table
        import rich.text

        table = rich.table.Table()
        for column in self._columns():
            table.add_column(column.heading, justify=column.align, overflow='fold')
        for texts in self._text_rows():
            table.add_row(*map(rich.text.Text, texts))
        table.add_section()
        table.add_row(*map(rich.text.Text, self._texts(self.total)), style='bold')
        return table

    def _columns(self) -> tuple[Column, ...]:
        return (*_COLUMNS, _FLOPS_COLUMN) if self.has_flops else _COLUMNS

    def _text_rows(self) -> list[list[str]]:
        """Writes a row for each leaf, or for equal layers."""
        text_rows = []
        names = [row.name for row in self.rows]
        alike = [(row.shape, row.dtype, row.flops is None) for row in self.rows]
        for name, indices in text_tables.group_layers(names, alike):
            rows = [self.rows[i] for i in indices]
            first = rows[0]
            texts = self._texts(_sum(rows, name, first.shape, first.dtype, first.flops is not None))
            texts[_SPARSITY] = text_tables.span([row.sparsity for row in rows], '{:.2%}'.format)
            text_rows.append(texts)
        return text_rows

    def _texts(self, row: TableRow) -> list[str]:
        shape = f'{row.weights:,}'  # in the row of totals
        if row.shape is not None:
            shape = '×'.join(map(str, row.shape)) or 'scalar'
        texts = [row.name, shape, row.dtype, f'{row.sparsity:.2%}', f'{row.kept:,}']
        texts += [_with_prefix(row.dense_bytes, 'B'), _with_prefix(row.packed_bytes, 'B')]
        if self.has_flops:
            texts.append(_MISSING if row.flops is None else _with_prefix(row.flops, ''))
        return texts


def _sum(
    rows: Sequence[TableRow],
    name: str,
    shape: tuple[int, ...] | None,
    dtype: str,
    has_flops: bool,
) -> TableRow:
    """Adds some rows up."""
    return TableRow(
        name=name,
        shape=shape,
        dtype=dtype,
        weights=sum(row.weights for row in rows),
        kept=sum(row.kept for row in rows),
        dense_bytes=sum(row.dense_bytes for row in rows),
        packed_bytes=sum(row.packed_bytes for row in rows),
        flops=sum(row.flops or 0 for row in rows) if has_flops else None,
    )


def tabulate(params: tree_lib.PyTree, masks: Any = None, graph: Any = None) -> SparsityTable:
    """Tabulates a model: each leaf with its shape, dtype, sparsity, kept weights, bytes, and floating point operations.

    Args:
      params: any pytree of arrays; `None`, random keys and numbers of Python are skipped. Where masks are given, shapes
        (`jax.ShapeDtypeStruct`) will do.
      masks: a tree like the parameters of masks, packed or not, `None` where dense; or an optimizer state that holds
        them. Without masks, weights that are zero count as pruned.
      graph: what `param_uses` returned, or a mapping of leaf names to floating point operations: adds a column of those
        of each dense leaf, `-` where there are none.

    Returns:
      A table that prints as plain text of 80 columns, and that rich renders. Its `rows` and its `total` hold the
      numbers. What is printed has one row for three or more equal layers, `'layers/{0-23}/kernel'`, with sums.

    Raises:
      ValueError: masks do not fit the parameters, or a name in `graph` matches no leaf.
      TypeError: the numbers are not known yet: inside `jit`, or of shapes without masks.

    >>> import jaxpruner
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
    kept_weights = _kept_weights(paths, leaves, _masks_of(masks, treedef))
    flops = _flops_of(paths, graph)
    rows = []
    for i, leaf in enumerate(leaves):
        weights = math.prod(leaf.shape)
        row = TableRow(
            name=tree_lib.path_string(paths[i]),
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            weights=weights,
            kept=kept_weights[i],
            dense_bytes=weights * leaf.dtype.itemsize,
            packed_bytes=utils.packed_bytes(weights, kept_weights[i], leaf.dtype.itemsize),
            flops=flops[i],
        )
        rows.append(row)
    return SparsityTable(tuple(rows), has_flops=graph is not None)


def _masks_of(masks: Any, treedef: Any) -> list[Any] | None:
    """The mask of each leaf, `None` where dense; `None` if there are no masks at all."""
    if masks is None:
        return None
    trees = [state.masks for state in sparse_state_lib.sparse_states(masks)] or [masks]
    masks_of_leaves: list[Any] = [None] * treedef.num_leaves
    for tree in trees:
        for i, mask in enumerate(tree_lib.leaves_like(treedef, tree)):
            if masks_of_leaves[i] is None:
                masks_of_leaves[i] = mask
    return masks_of_leaves


def _kept_weights(
    paths: list[tree_lib.Path], leaves: list[Any], masks: list[Any] | None
) -> list[int]:
    """How many weights are kept of each leaf; all counts are fetched from the device at once."""
    counts = []
    for i, leaf in enumerate(leaves):
        if masks is None:
            _check_is_array(paths[i], leaf)
            counts.append(utils.count_nonzero(leaf))
        elif masks[i] is None:
            counts.append(math.prod(leaf.shape))
        else:
            counts.append(_count_kept(paths[i], leaf, masks[i]))
    return [int(count) for count in jax.device_get(counts)]


def _count_kept(path: tree_lib.Path, leaf: Any, mask: Any) -> Any:
    _check_is_array(path, mask)
    # Compares the shapes alone; an error names the leaf.
    name = tree_lib.path_string(path)
    jax.eval_shape(sparse_state_lib.unpack_masks, {name: mask}, {name: leaf})
    is_mask_dtype = mask.dtype == jnp.uint8
    return sparse_state_lib.kept_weights(mask if is_mask_dtype else (mask != 0).astype(jnp.uint8))


def _check_is_array(path: tree_lib.Path, leaf: Any) -> None:
    if tree_lib.is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            f'{tree_lib.path_string(path)}: a table needs numbers that are known, got {type(leaf).__name__}; call '
            'tabulate outside jit, and give masks where parameters are shapes alone (summarize_sparsity counts in jit)'
        )


def _flops_of(paths: list[tree_lib.Path], graph: Any) -> list[Any]:
    """The floating point operations of each leaf, `None` where they are not known."""
    if graph is None:
        return [None] * len(paths)
    flops: Mapping[Any, float] = getattr(graph, 'leaf_flops', graph)
    rules = tree_lib.first_matches(flops, paths, 'graph')
    values = list(flops.values())
    return [None if rule is None else values[rule] for rule in rules]


def _with_prefix(number: float, unit: str) -> str:
    """A number with three digits and a decimal prefix.

    >>> _with_prefix(9437184, 'B'), _with_prefix(999.9, 'B'), _with_prefix(0, '')
    ('9.44 MB', '1 kB', '0')
    """
    prefixes = iter(_PREFIXES)
    prefix = next(prefixes)
    while number >= _DECIMAL_STEP - 0.5:
        number /= _DECIMAL_STEP
        prefix = next(prefixes)
    return f'{number:.3g} {prefix}{unit}'.strip()
