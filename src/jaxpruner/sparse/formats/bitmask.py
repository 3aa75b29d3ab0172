"""One bit a weight, and the kept weights in flat order. The smallest for scattered zeros up to about 94 %."""

import math

import numpy as np

from jaxpruner.sparse.formats import leaf_arrays
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

KEYS = ('compressed', 'bitmask', 'shape')


def plan(kept: Kept, itemsize: int) -> Plan:
    """Every pattern fits."""
    return Plan(kept.count * itemsize + -(-kept.mask.size // 8))


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """The first weight is the highest bit of the first byte."""
    del settings
    return {
        'compressed': array.reshape(-1)[np.flatnonzero(mask)],
        'bitmask': np.packbits(mask),
        'shape': np.array(array.shape, np.int64),
    }


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Refuses another number of bits than weights, and of ones than kept weights."""
    bits, shape = arrays['bitmask'], leaf_arrays.shape_from(arrays['shape'])
    leaf_arrays.check_bits('bitmask', bits, math.prod(shape))
    kept = int(np.count_nonzero(np.unpackbits(bits)))
    leaf_arrays.check_lengths('compressed', arrays['compressed'], kept)
    return shape


def unpack(arrays: StoredArrays) -> np.ndarray:
    """Returns the leaf."""
    values, shape = arrays['compressed'], arrays['shape'].tolist()
    leaf = np.zeros(math.prod(shape), values.dtype)
    leaf[np.flatnonzero(np.unpackbits(arrays['bitmask'], count=leaf.size))] = values
    return leaf.reshape(shape)
