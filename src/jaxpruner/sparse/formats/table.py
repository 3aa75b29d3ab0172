"""All formats, and the smallest of them for a leaf."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.sparse.formats import blocks, csr, leaf_arrays, n_by_m
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

# The largest ratio of unpacked to packed bytes, beyond the first MiB: a small file must not claim a terabyte of zeros.
# One row of 65,536 float32 zeros in CSR reaches it.
_MOST_EXPANSION = 2**16
_ALWAYS_ALLOWED_BYTES = 2**20
# Bytes that an array takes beside its numbers: its entry in a file's header, or its object.
_BYTES_OF_AN_ENTRY = 128
# Up to this factor sizes count as equal: a single zero among the kept weights of a 2:4 pattern must not decide.
_NEARLY = 1.01


class Format(NamedTuple):
    """A way to leave out the zeros of a leaf; `formats/__init__.py` says what its functions do.

    Attributes:
      plan, pack, check, unpack: functions of its file.
      keys: the names of all arrays; those of the kept weights come first.
    """

    plan: Callable[[Kept, int], Plan | None]
    pack: Callable[[np.ndarray, np.ndarray, tuple[int, ...]], StoredArrays]
    check: Callable[[StoredArrays], tuple[int, ...]]
    unpack: Callable[[StoredArrays], np.ndarray]
    keys: tuple[str, ...]

    @property
    def values_key(self) -> str:
        """The name of the array of kept weights."""
        return self.keys[0]


def _row(module: Any, *keys: str) -> Format:
    return Format(module.plan, module.pack, module.check, module.unpack, keys)


class _Dense:
    """The leaf as it is."""

    @staticmethod
    def plan(kept: Kept, itemsize: int) -> Plan | None:
        # A given mask would be lost.
        is_lossy = kept.is_given and kept.count < kept.mask.size
        return None if is_lossy else Plan(kept.mask.size * itemsize)

    @staticmethod
    def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
        del mask, settings
        return {'values': array}

    @staticmethod
    def check(arrays: StoredArrays) -> tuple[int, ...]:
        return arrays['values'].shape

    @staticmethod
    def unpack(arrays: StoredArrays) -> np.ndarray:
        return arrays['values']


class _Bitmask:
    """One bit a weight, and the kept weights in flat order. The smallest for scattered zeros up to about 94 %."""

    @staticmethod
    def plan(kept: Kept, itemsize: int) -> Plan:
        return Plan(kept.count * itemsize + -(-kept.mask.size // 8))

    @staticmethod
    def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
        # The first weight is the highest bit of the first byte.
        del settings
        return {
            'compressed': array.reshape(-1)[np.flatnonzero(mask)],
            'bitmask': np.packbits(mask),
            'shape': np.array(array.shape, np.int64),
        }

    @staticmethod
    def check(arrays: StoredArrays) -> tuple[int, ...]:
        bits, shape = arrays['bitmask'], leaf_arrays.shape_from(arrays['shape'])
        leaf_arrays.check_bits('bitmask', bits, math.prod(shape))
        kept = int(np.count_nonzero(np.unpackbits(bits)))
        leaf_arrays.check_lengths('compressed', arrays['compressed'], kept)
        return shape

    @staticmethod
    def unpack(arrays: StoredArrays) -> np.ndarray:
        values, shape = arrays['compressed'], arrays['shape'].tolist()
        leaf = np.zeros(math.prod(shape), values.dtype)
        leaf[np.flatnonzero(np.unpackbits(arrays['bitmask'], count=leaf.size))] = values
        return leaf.reshape(shape)


# Order is preference among formats of nearly equal size: bitmask last, since no kernel runs it.
FORMATS: Mapping[str, Format] = {
    'dense': _row(_Dense, 'values'),
    'n_by_m': _row(n_by_m, 'compressed', 'indices', 'pattern'),
    'blocks': _row(blocks, 'values', 'indices', 'shape'),
    'csr': _row(csr, 'compressed', 'row_offsets', 'column_indices', 'shape'),
    'bitmask': _row(_Bitmask, 'compressed', 'bitmask', 'shape'),
}


def plans_of(kept: Kept, itemsize: int) -> dict[str, Plan]:
    """Plans a leaf in each format that its pattern fits."""
    plans = {name: row.plan(kept, itemsize) for name, row in FORMATS.items()}
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
    more_entries = _BYTES_OF_AN_ENTRY * (len(FORMATS[best].keys) - 1)
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
    leaf_bytes = math.prod(shape) * arrays[FORMATS[name].values_key].dtype.itemsize
    packed_bytes = sum(array.nbytes for array in arrays.values())
    if _is_too_large(leaf_bytes, packed_bytes):
        raise ValueError(
            f'its shape {shape} takes {leaf_bytes} bytes, and it is packed into {packed_bytes}; at most '
            f'{_MOST_EXPANSION} times as much is unpacked'
        )
    return shape


def stored_mask(name: str, arrays: StoredArrays) -> np.ndarray:
    """Returns the mask of what is stored, uint8; the arrays were checked before."""
    values_key = FORMATS[name].values_key
    ones = np.ones(arrays[values_key].shape, np.uint8)
    return FORMATS[name].unpack({**arrays, values_key: ones})
