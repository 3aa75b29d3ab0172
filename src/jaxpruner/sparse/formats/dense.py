"""Dense: the leaf as it is."""

import numpy as np

from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

KEYS = ('values',)


def plan(kept: Kept, itemsize: int) -> Plan | None:
    """A given mask would be lost."""
    is_lossy = kept.is_given and kept.count < kept.mask.size
    return None if is_lossy else Plan(kept.mask.size * itemsize)


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """Returns the leaf."""
    del mask, settings
    return {'values': array}


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Any array is one."""
    return arrays['values'].shape


def unpack(arrays: StoredArrays) -> np.ndarray:
    """Returns the leaf."""
    return arrays['values']
