"""Bitmask: one bit a weight, and the kept weights in flat order."""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays
from jaxpruner.sparse.formats.gathering import CHUNK, kept_values

_BITS = 8


class BitmaskStorage:
    """The smallest format for scattered zeros, up to about 94 % of them."""

    name = 'bitmask'
    values_key = 'compressed'
    keys = frozenset({'bitmask', 'compressed', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the arrays, which fit every pattern."""
        mask = pattern.mask
        arrays = {
            'compressed': ArraySpec((pattern.kept,), dtype),
            'bitmask': ArraySpec((-(-mask.size // _BITS),), np.dtype('uint8')),
            'shape': ArraySpec((mask.ndim,), np.dtype('int64')),
        }
        plan = Plan(self.name, arrays)
        return plan if plan.weight_bytes <= most_bytes else None

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
        """Returns the arrays; the first weight is the highest bit of the first byte, as in `np.packbits`."""
        return {
            'compressed': kept_values(array, mask, plan.arrays['compressed'].shape[0]),
            'bitmask': np.packbits(mask),
            'shape': np.array(array.shape, np.int64),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is spelt out."""
        return array_checks.shape_from(arrays['shape'])

    def check(self, arrays: StoredArrays) -> None:
        """Refuses bits that do not add up to the values."""
        size = math.prod(self.shape(arrays))
        bits, values = arrays['bitmask'], arrays['compressed']
        array_checks.check_array('bitmask', bits, axes=1)
        if bits.dtype != np.uint8:
            raise ValueError(f'bitmask has dtype {bits.dtype}; it must have uint8')
        array_checks.check_length('bitmask', bits, -(-size // _BITS))
        array_checks.check_padding('bitmask', bits, size)
        kept = 0
        for start in range(0, len(bits), CHUNK):
            kept += int(np.count_nonzero(np.unpackbits(bits[start : start + CHUNK])))
        array_checks.check_length('compressed', values, kept)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf, spread a chunk at a time."""
        shape = self.shape(arrays)
        bits, values = arrays['bitmask'], arrays['compressed']
        leaf = np.zeros(math.prod(shape), values.dtype)
        first = 0
        for start in range(0, leaf.size, CHUNK):
            chunk_bits = bits[start // _BITS : (start + CHUNK) // _BITS]
            positions = np.flatnonzero(np.unpackbits(chunk_bits))
            last = first + len(positions)
            leaf[start : start + CHUNK][positions] = values[first:last]
            first = last
        return leaf.reshape(shape)
