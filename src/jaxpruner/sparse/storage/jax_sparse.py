"""Converts to and from the matrices of `jax.experimental.sparse`, which this library does not compute with."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.files import host_arrays
from jaxpruner.sparse.storage import packing

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

    shape, values, rows, columns = _kept_elements(weights, mask)
    offsets = np.concatenate([[0], np.bincount(rows, minlength=shape[0]).cumsum()])
    arrays = (values, columns, offsets.astype(columns.dtype))
    placed = [host_arrays.on_device('the matrix', array) for array in arrays]
    return jax_sparse.BCSR((placed[0], placed[1], placed[2]), shape=shape)


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

    shape, values, rows, columns = _kept_elements(weights, mask)
    indices = np.stack([rows, columns], axis=1)
    data = host_arrays.on_device('the matrix', values)
    indices = host_arrays.on_device('the matrix', indices)
    return jax_sparse.BCOO((data, indices), shape=shape, indices_sorted=True, unique_indices=True)


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
    height, width = matrix.shape
    rows = np.repeat(np.arange(height), np.diff(np.asarray(matrix.indptr)))
    columns = np.asarray(matrix.indices)[: len(rows)]
    order = np.lexsort((columns, rows))
    order = order[columns[order] < width]  # padding stands behind the last column
    rows, columns = rows[order], columns[order]
    repeated = int(np.count_nonzero((np.diff(rows) == 0) & (np.diff(columns) == 0)))
    if repeated:
        raise ValueError(
            f'matrix has {repeated} elements more than once; add them up first, with sum_duplicates'
        )
    offsets = np.concatenate([[0], np.bincount(rows, minlength=height).cumsum()])
    return {
        'compressed': np.asarray(matrix.data)[order],
        'row_offsets': offsets.astype(np.int32 if len(rows) < 2**31 else np.int64),
        'column_indices': columns.astype(np.uint16 if width <= 2**16 else np.uint32),
        'shape': np.array(matrix.shape, np.int64),
    }


def _kept_elements(
    weights: Any, mask: Any
) -> tuple[tuple[int, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Returns the shape of a matrix, and the values, rows and columns of what is kept of it."""
    if isinstance(weights, dict):
        mask = packing.stored_masks(weights) if mask is None else mask
        weights = packing.unpack(weights)
    ((name, (_, array)),) = host_arrays.named_arrays(weights).items()
    values = host_arrays.on_host(array)
    if values.ndim != 2:
        raise ValueError(
            f'weights have shape {values.shape}; a matrix has two axes: reshape them, or convert each layer'
        )
    rows, columns = np.nonzero(packing.kept_pattern(name, values, mask).mask)
    index_dtype = np.int32 if max(values.shape[1], len(rows)) < 2**31 else np.int64
    return (
        values.shape,
        values[rows, columns],
        rows.astype(index_dtype),
        columns.astype(index_dtype),
    )
