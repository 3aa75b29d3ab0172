"""All formats, and the smallest of them for a leaf."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.sparse.formats import array_checks, bitmask, blocks, csr, n_by_m
from jaxpruner.sparse.formats.plans import Kept, Plan, StoredArrays

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
      is_searched: whether the plan looks for a structure in the mask. It is then made last, so that it can stop as soon
        as it is larger than another one.
    """

    plan: Callable[[Kept, int, int], Plan | None]
    pack: Callable[[np.ndarray, np.ndarray, tuple[int, ...]], StoredArrays]
    check: Callable[[StoredArrays], tuple[int, ...]]
    unpack: Callable[[StoredArrays], np.ndarray]
    keys: tuple[str, ...]
    is_searched: bool = False

    @property
    def values_key(self) -> str:
        """The name of the array of kept weights."""
        return self.keys[0]


def _row(module: Any, *keys: str, is_searched: bool = False) -> Format:
    return Format(module.plan, module.pack, module.check, module.unpack, keys, is_searched)


def _plan_dense(kept: Kept, itemsize: int, most_bytes: int) -> Plan | None:
    del most_bytes
    # A given mask would be lost.
    is_lossy = kept.is_given and kept.count < kept.mask.size
    return None if is_lossy else Plan(kept.mask.size * itemsize)


_DENSE = Format(
    plan=_plan_dense,
    pack=lambda array, mask, settings: {'values': array},
    check=lambda arrays: arrays['values'].shape,
    unpack=lambda arrays: arrays['values'],
    keys=('values',),
)
# Order is preference among formats of nearly equal size: bitmask last, since no kernel runs it.
FORMATS: Mapping[str, Format] = {
    'dense': _DENSE,
    'n_by_m': _row(n_by_m, 'compressed', 'indices', 'pattern', is_searched=True),
    'blocks': _row(blocks, 'values', 'indices', 'shape', is_searched=True),
    'csr': _row(csr, 'compressed', 'row_offsets', 'column_indices', 'shape'),
    'bitmask': _row(bitmask, 'compressed', 'bitmask', 'shape'),
}


def plans_of(kept: Kept, itemsize: int, all_sizes: bool = False) -> dict[str, Plan]:
    """Plans a leaf in each format that its pattern fits.

    Args:
      kept: the pattern.
      itemsize: bytes of a weight.
      all_sizes: whether to look for N:M and blocks that are smaller than dense; by default only for those that are
        smaller than all other formats, which takes less time.
    """
    most_bytes = kept.mask.size * itemsize
    plans: dict[str, Plan] = {}
    for name in sorted(FORMATS, key=lambda name: FORMATS[name].is_searched):
        plan = FORMATS[name].plan(kept, itemsize, int(_NEARLY * most_bytes))
        if plan is not None:
            plans[name] = plan
            if not all_sizes and not FORMATS[name].is_searched:
                most_bytes = min(most_bytes, plan.bytes)
    return {name: plans[name] for name in FORMATS if name in plans}


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
    array_checks.check_shape(shape)
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
