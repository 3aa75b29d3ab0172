"""Bitmask: one bit a weight, and the kept weights in flat order."""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays, shape_spec


class BitmaskStorage:
    """The smallest format for scattered zeros, up to about 94 % of them."""

    name = 'bitmask'
    values_key = 'compressed'
    keys = frozenset({'bitmask', 'compressed', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the arrays, which fit every pattern."""
        arrays = {
            'compressed': ArraySpec((pattern.kept,), dtype),
            'bitmask': ArraySpec((-(-pattern.mask.size // 8),), np.dtype('uint8')),
            'shape': shape_spec(pattern.mask),
        }
        return Plan(self.name, arrays).within(most_bytes)

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays; the first weight is the highest bit of the first byte, as in `np.packbits`."""
        return {
            'compressed': array.reshape(-1)[np.flatnonzero(mask)],
            'bitmask': np.packbits(mask),
            'shape': np.array(array.shape, np.int64),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is stored."""
        return array_checks.shape_from(arrays['shape'])

    def check(self, arrays: StoredArrays) -> None:
        """Refuses arrays in which the number of values is not the number of bits that are set."""
        bits = arrays['bitmask']
        array_checks.check_array('bitmask', bits, axes=1)
        array_checks.check_bits('bitmask', bits, math.prod(self.shape(arrays)))
        kept = int(np.count_nonzero(np.unpackbits(bits)))
        array_checks.check_length('compressed', arrays['compressed'], kept)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        values, shape = arrays['compressed'], self.shape(arrays)
        leaf = np.zeros(math.prod(shape), values.dtype)
        leaf[np.flatnonzero(np.unpackbits(arrays['bitmask'], count=leaf.size))] = values
        return leaf.reshape(shape)
