"""Bitmask: one bit a weight, and the kept weights in flat order."""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import (
    ArraySpec,
    KeptPattern,
    Plan,
    StoredArrays,
    shape_array,
    shape_spec,
)
from jaxpruner.sparse.formats.gathering import CHUNK, kept_values
from jaxpruner.sparse.formats.number_bits import packed_length

_BITS = 8


class BitmaskStorage:
    """The smallest format for scattered zeros, up to about 94 % of them."""

    name = 'bitmask'
    values_key = 'compressed'
    keys = frozenset({'bitmask', 'compressed', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the arrays, which fit every pattern."""
        mask = pattern.mask
        bytes_of_bits = packed_length(mask.size, width=1)
        arrays = {
            'compressed': ArraySpec((pattern.kept,), dtype),
            'bitmask': ArraySpec((bytes_of_bits,), np.dtype('uint8')),
            'shape': shape_spec(mask),
        }
        plan = Plan(self.name, arrays)
        return plan if plan.weight_bytes <= most_bytes else None

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays; the first weight is the highest bit of the first byte, as in `np.packbits`."""
        (kept,) = plan.arrays['compressed'].shape
        return {
            'compressed': kept_values(array, mask, kept),
            'bitmask': np.packbits(mask),
            'shape': shape_array(array),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is stored."""
        return array_checks.shape_from(arrays['shape'])

    def check(self, arrays: StoredArrays) -> None:
        """Refuses arrays in which the number of values is not the number of bits that are set."""
        size = math.prod(self.shape(arrays))
        bits = arrays['bitmask']
        array_checks.check_array('bitmask', bits, axes=1)
        array_checks.check_bits('bitmask', bits, size)
        kept = 0
        for start in range(0, len(bits), CHUNK):
            chunk = np.unpackbits(bits[start : start + CHUNK])
            kept += int(np.count_nonzero(chunk))
        array_checks.check_length('compressed', arrays['compressed'], kept)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf, spread a chunk at a time."""
        shape = self.shape(arrays)
        bits = arrays['bitmask']
        values = arrays['compressed']
        leaf = np.zeros(math.prod(shape), values.dtype)
        first = 0
        for start in range(0, leaf.size, CHUNK):
            stop = start + CHUNK
            chunk_bits = np.unpackbits(bits[start // _BITS : stop // _BITS])
            positions = np.flatnonzero(chunk_bits)
            last = first + len(positions)
            chunk = leaf[start:stop]
            chunk[positions] = values[first:last]
            first = last
        return leaf.reshape(shape)
