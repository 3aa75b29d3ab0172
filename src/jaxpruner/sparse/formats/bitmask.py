"""Bitmask: one bit a weight, and the kept weights in flat order. The smallest for scattered zeros up to about 94 %."""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.plans import Kept, Plan, StoredArrays


def plan(kept: Kept, itemsize: int, most_bytes: int) -> Plan | None:
    """Every pattern fits."""
    del most_bytes
    return Plan(kept.count * itemsize + -(-kept.mask.size // 8))


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """The first weight is the highest bit of the first byte, as in `np.packbits`."""
    del settings
    return {
        'compressed': array.reshape(-1)[np.flatnonzero(mask)],
        'bitmask': np.packbits(mask),
        'shape': np.array(array.shape, np.int64),
    }


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Refuses arrays in which the number of values is not the number of bits that are set."""
    bits, shape = arrays['bitmask'], array_checks.shape_from(arrays['shape'])
    array_checks.check_bits('bitmask', bits, math.prod(shape))
    kept = int(np.count_nonzero(np.unpackbits(bits)))
    array_checks.check_lengths('compressed', arrays['compressed'], kept)
    return shape


def unpack(arrays: StoredArrays) -> np.ndarray:
    """Returns the leaf."""
    values, shape = arrays['compressed'], arrays['shape'].tolist()
    leaf = np.zeros(math.prod(shape), values.dtype)
    leaf[np.flatnonzero(np.unpackbits(arrays['bitmask'], count=leaf.size))] = values
    return leaf.reshape(shape)
