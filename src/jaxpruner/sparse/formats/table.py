"""All formats, and the smallest of them for a leaf."""

import math
from collections.abc import Mapping

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import KeptPattern, Plan, StorageFormat, StoredArrays
from jaxpruner.sparse.formats.bitmask import BitmaskStorage
from jaxpruner.sparse.formats.blocks import BlockStorage
from jaxpruner.sparse.formats.csr import CsrStorage
from jaxpruner.sparse.formats.dense import DenseStorage
from jaxpruner.sparse.formats.n_by_m import NByMStorage

# Order is preference among formats of nearly equal size: bitmask last, since no kernel runs it.
FORMATS: Mapping[str, StorageFormat] = {
    entry.name: entry
    for entry in (DenseStorage(), NByMStorage(), BlockStorage(), CsrStorage(), BitmaskStorage())
}
# Formats that look for a structure in the mask. They are planned last: then they can stop as soon as they are larger
# than another format.
_SEARCHED = (NByMStorage.name, BlockStorage.name)
# Bytes that an array takes beside its numbers: its entry in a file's header, or its object.
_BYTES_OF_AN_ENTRY = 128
_UNLIMITED = 2**63
# Up to this factor sizes count as equal: a single zero among the kept weights of a 2:4 pattern must not decide.
_NEARLY = 1.01


def plans_of(
    pattern: KeptPattern, dtype: np.dtype, all_sizes: bool = False
) -> dict[str, Plan | None]:
    """Plans a leaf in each format.

    Args:
      pattern: of the leaf.
      dtype: of the leaf.
      all_sizes: whether to look for N:M and blocks that are smaller than dense; by default only for those that are
        smaller than all other formats, which takes less time.

    Returns:
      The plans by the name of the format; `None` where the pattern does not fit.
    """
    most_bytes = dense_bytes(pattern, dtype)
    plans: dict[str, Plan | None] = {}
    for name, entry in FORMATS.items():
        if name in _SEARCHED:
            continue
        plan = entry.plan(pattern, dtype, _UNLIMITED)
        plans[name] = plan
        if plan is not None and not all_sizes:
            most_bytes = min(most_bytes, plan.weight_bytes)
    most_bytes = int(_NEARLY * most_bytes)
    for name in _SEARCHED:
        plans[name] = FORMATS[name].plan(pattern, dtype, most_bytes)
    return {name: plans[name] for name in FORMATS}


def smallest(plans: Mapping[str, Plan | None], dense_bytes: int) -> Plan:
    """Returns the first plan of nearly the fewest bytes; dense if that is no larger, entries counted."""
    fitting: list[Plan] = []
    for plan in plans.values():
        if plan is not None and not array_checks.is_too_large(dense_bytes, plan.bytes):
            fitting.append(plan)
    fewest = min(plan.weight_bytes for plan in fitting)
    best = next(plan for plan in fitting if plan.weight_bytes <= _NEARLY * fewest)
    dense = plans['dense']
    if dense is not None and _bytes_with_entries(best) >= _bytes_with_entries(dense):
        return dense
    return best


def best_plan(pattern: KeptPattern, dtype: np.dtype) -> Plan:
    """Returns how a leaf is stored."""
    plans = plans_of(pattern, dtype)
    return smallest(plans, dense_bytes(pattern, dtype))


def dense_bytes(pattern: KeptPattern, dtype: np.dtype) -> int:
    """Returns the bytes of the leaf as it is."""
    return pattern.mask.size * dtype.itemsize


def _bytes_with_entries(plan: Plan) -> int:
    return plan.bytes + len(plan.arrays) * _BYTES_OF_AN_ENTRY


def check(name: str, arrays: StoredArrays) -> None:
    """Refuses arrays that the format did not make, and those that claim a leaf far larger than they are."""
    entry = FORMATS[name]
    shape = entry.shape(arrays)
    array_checks.check_shape(shape)
    values = arrays[entry.values_key]
    leaf_bytes = math.prod(shape) * values.dtype.itemsize
    packed_bytes = sum(array.nbytes for array in arrays.values())
    if array_checks.is_too_large(leaf_bytes, packed_bytes):
        raise ValueError(
            f'its shape {shape} takes {leaf_bytes} bytes, and it is packed into {packed_bytes}; at most '
            f'{array_checks.MOST_EXPANSION} times as much is unpacked'
        )
    entry.check(arrays)


def stored_mask(name: str, arrays: StoredArrays) -> np.ndarray:
    """Returns the mask of what is stored, as booleans; the arrays were checked before."""
    entry = FORMATS[name]
    values = arrays[entry.values_key]
    ones = np.ones(values.shape, bool)
    return entry.unpack({**arrays, entry.values_key: ones})
