"""All formats, and the smallest of them for a leaf."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.sparse.formats import bitmask, blocks, csr, dense, leaf_arrays, n_by_m
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

# The largest ratio of unpacked to packed bytes, beyond the first MiB: a small file must not claim a terabyte of zeros.
# One row of 65,536 float32 zeros in CSR reaches it.
_MOST_EXPANSION = 2**16
_ALWAYS_ALLOWED_BYTES = 2**20
# Bytes that an array takes beside its numbers: its entry in a file's header, or its object.
_BYTES_OF_AN_ENTRY = 128
# Up to this factor sizes count as equal: a single zero among the kept weights of a 2:4 pattern must not decide.
_NEARLY = 1.01


# Order is preference among formats of nearly equal size: bitmask last, since no kernel runs it.
FORMATS: Mapping[str, Any] = {
    'dense': dense,
    'n_by_m': n_by_m,
    'blocks': blocks,
    'csr': csr,
    'bitmask': bitmask,
}


def plans_of(kept: Kept, itemsize: int) -> dict[str, Plan]:
    """Plans a leaf in each format that its pattern fits."""
    plans = {name: format.plan(kept, itemsize) for name, format in FORMATS.items()}
    return {name: plan for name, plan in plans.items() if plan is not None}


def smallest(kept: Kept, itemsize: int, plans: Mapping[str, Plan]) -> str:
    """Returns the first format of nearly the fewest bytes; dense if that is no larger, entries counted."""
    dense_bytes = kept.mask.size * itemsize
    sizes = {}
    for name, plan in plans.items():
        if not _is_too_large(dense_bytes, plan.bytes):
            sizes[name] = plan.bytes
    fewest = min(sizes.values())
    best = next(name for name in sizes if sizes[name] <= _NEARLY * fewest)
    more_entries = _BYTES_OF_AN_ENTRY * (len(FORMATS[best].KEYS) - 1)
    is_dense = 'dense' in sizes and sizes[best] + more_entries >= sizes['dense']
    return 'dense' if is_dense else best


def _is_too_large(dense_bytes: int, packed_bytes: int) -> bool:
    return dense_bytes > _MOST_EXPANSION * packed_bytes + _ALWAYS_ALLOWED_BYTES


def check(name: str, arrays: StoredArrays) -> tuple[int, ...]:
    """Returns the shape of a leaf; refuses arrays that the format did not make, or that claim far more than they are.

    Raises:
      ValueError: it says what is wrong.
    """
    shape = FORMATS[name].check(arrays)
    leaf_arrays.check_shape(shape)
    leaf_bytes = math.prod(shape) * arrays[FORMATS[name].KEYS[0]].dtype.itemsize
    packed_bytes = sum(array.nbytes for array in arrays.values())
    if _is_too_large(leaf_bytes, packed_bytes):
        raise ValueError(
            f'its shape {shape} takes {leaf_bytes} bytes, and it is packed into {packed_bytes}; at most '
            f'{_MOST_EXPANSION} times as much is unpacked'
        )
    return shape


def stored_mask(name: str, arrays: StoredArrays) -> np.ndarray:
    """Returns the mask of what is stored, uint8; the arrays were checked before."""
    values_key = FORMATS[name].KEYS[0]
    ones = np.ones(arrays[values_key].shape, np.uint8)
    return FORMATS[name].unpack({**arrays, values_key: ones})
