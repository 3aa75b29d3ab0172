"""Converts to the matrices of `jax.experimental.sparse`, which this library does not compute with."""

from typing import TYPE_CHECKING, Any

from jaxpruner.files import host_arrays
from jaxpruner.sparse.formats import csr
from jaxpruner.sparse.storage import packing

if TYPE_CHECKING:
    from jax.experimental import sparse as jax_sparse


def to_bcsr(weights: Any, *, mask: Any = None) -> 'jax_sparse.BCSR':
    """Converts a matrix to `jax.experimental.sparse.BCSR`, whose `to_bcoo()` is the same in coordinates.

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

    if isinstance(weights, dict):
        mask = packing.stored_masks(weights) if mask is None else mask
        weights = packing.unpack(weights)
    ((name, (_, array)),) = host_arrays.named_arrays(weights).items()
    values = host_arrays.on_host(array)
    if values.ndim != 2:
        raise ValueError(
            f'weights have shape {values.shape}; a matrix has two axes: reshape them, or convert each layer'
        )
    packed = csr.pack(values, packing.kept_weights(name, values, mask).mask, ())
    offsets = packed['row_offsets']
    columns = packed['column_indices'].astype(offsets.dtype)
    arrays = packed['compressed'], columns, offsets
    data, indices, indptr = (host_arrays.on_device('the matrix', array) for array in arrays)
    return jax_sparse.BCSR((data, indices, indptr), shape=values.shape)
