"""Converts to and from the matrices of `jax.experimental.sparse`, which this library does not compute with."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.files import host_arrays
from jaxpruner.sparse.formats import table
from jaxpruner.sparse.formats.base import KeptPattern
from jaxpruner.sparse.storage.leaves import leaves_of_tree
from jaxpruner.sparse.storage.packing import stored_masks, unpack

if TYPE_CHECKING:
    from jax.experimental import sparse as jax_sparse


def to_bcsr(weights: Any, *, mask: Any = None) -> 'jax_sparse.BCSR':
    """Converts a matrix to `jax.experimental.sparse.BCSR`.

    Args:
      weights: an array [rows, columns], or what `pack` made of one.
      mask: what is kept, packed or not; without, all but +0, or what the packed leaf stores.

    Returns:
      The matrix with as many stored elements as weights are kept; columns of a row ascend.

    Raises:
      ValueError: it is no matrix, the mask does not fit or removes what is not +0, or JAX would round the weights.
      TypeError: the weights are no array.

    >>> import jax.numpy as jnp
    >>> matrix = to_bcsr(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> matrix.indptr.tolist(), matrix.indices.tolist(), matrix.data.tolist()
    ([0, 1, 2], [1, 0], [2.0, 3.0])
    """
    from jax.experimental import sparse as jax_sparse

    arrays = _csr_arrays(weights, mask)
    shape = tuple(arrays['shape'].tolist())
    data = host_arrays.on_device('the matrix', arrays['compressed'])
    indices = host_arrays.on_device('the matrix: column_indices', arrays['column_indices'])
    offsets = host_arrays.on_device('the matrix: row_offsets', arrays['row_offsets'])
    return jax_sparse.BCSR((data, indices, offsets), shape=shape)


def to_bcoo(weights: Any, *, mask: Any = None) -> 'jax_sparse.BCOO':
    """Converts a matrix to `jax.experimental.sparse.BCOO`.

    Args:
      weights: an array [rows, columns], or what `pack` made of one.
      mask: what is kept, packed or not; without, all but +0, or what the packed leaf stores.

    Returns:
      The matrix with as many stored elements as weights are kept, sorted, each once.

    Raises:
      ValueError: it is no matrix, the mask does not fit or removes what is not +0, or JAX would round the weights.
      TypeError: the weights are no array.

    >>> import jax.numpy as jnp
    >>> to_bcoo(jnp.array([[0.0, 2.0], [3.0, 0.0]])).indices.tolist()
    [[0, 1], [1, 0]]
    """
    from jax.experimental import sparse as jax_sparse

    arrays = _csr_arrays(weights, mask)
    shape = tuple(arrays['shape'].tolist())
    columns = arrays['column_indices']
    rows = _rows_of(arrays['row_offsets'])
    rows = rows.astype(columns.dtype)
    indices = np.stack([rows, columns], axis=1)
    data = host_arrays.on_device('the matrix', arrays['compressed'])
    indices = host_arrays.on_device('the matrix: indices', indices)
    return jax_sparse.BCOO(
        (data, indices),
        shape=shape,
        indices_sorted=True,
        unique_indices=True,
    )


def from_bcsr(matrix: 'jax_sparse.BCSR') -> dict[str, np.ndarray]:
    """Converts a `jax.experimental.sparse.BCSR` to a packed leaf of its stored elements, for `unpack`.

    Args:
      matrix: without batch or dense axes.

    Returns:
      CSR as in `pack`, columns of a row ascending. Padding is left out.

    Raises:
      TypeError: it is no BCSR.
      ValueError: it has batch or dense axes, or an element twice.

    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> sparse.unpack(from_bcsr(to_bcsr(jnp.array([[0.0, 2.0], [3.0, 0.0]])))).tolist()
    [[0.0, 2.0], [3.0, 0.0]]
    """
    from jax.experimental import sparse as jax_sparse

    if not isinstance(matrix, jax_sparse.BCSR):
        raise TypeError(
            f'matrix must be a jax.experimental.sparse.BCSR, got {type(matrix).__name__}'
        )
    if matrix.n_batch or matrix.n_dense:
        raise ValueError(
            f'matrix has {matrix.n_batch} batch axes and {matrix.n_dense} dense ones; convert one matrix at a time'
        )
    rows = _rows_of(np.asarray(matrix.indptr))
    stored = len(rows)
    columns = np.asarray(matrix.indices)[:stored]
    values = np.asarray(matrix.data)[:stored]
    is_inside = columns < matrix.shape[1]  # padding stands behind the last column
    places = rows[is_inside], columns[is_inside]
    mask = np.zeros(matrix.shape, bool)
    mask[places] = True
    pattern = KeptPattern.of(mask)
    repeated = np.count_nonzero(is_inside) - pattern.kept
    if repeated:
        raise ValueError(
            f'matrix has {repeated} elements more than once; add them up first, with sum_duplicates'
        )
    dense = np.zeros(matrix.shape, values.dtype)
    dense[places] = values[is_inside]
    return _pack_as_csr(dense, pattern)


def _rows_of(offsets: np.ndarray) -> np.ndarray:
    """The row of each stored element."""
    counts = np.diff(offsets)
    return np.repeat(np.arange(len(counts)), counts)


def _csr_arrays(weights: Any, mask: Any) -> dict[str, np.ndarray]:
    if isinstance(weights, dict):
        mask = stored_masks(weights) if mask is None else mask
        weights = unpack(weights)
    (source,) = leaves_of_tree(weights, mask)
    if len(source.shape) != 2:
        raise ValueError(
            f'weights have shape {source.shape}; a matrix has two axes: reshape them, or convert each layer'
        )
    values = source.values()
    arrays = _pack_as_csr(values, source.pattern(values))
    index_dtype = np.int32 if source.shape[1] < 2**31 else np.int64
    columns = arrays['column_indices']
    arrays['column_indices'] = columns.astype(index_dtype)
    return arrays


def _pack_as_csr(values: np.ndarray, pattern: KeptPattern) -> dict[str, np.ndarray]:
    csr = table.FORMATS['csr']
    plan = csr.plan(pattern, values.dtype, 2**63)
    assert plan is not None  # CSR fits every matrix
    arrays = csr.pack(values, pattern.mask, plan)
    return dict(arrays)
