"""Dense: the leaf as it is."""

import numpy as np

from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays


class DenseStorage:
    """The format for leaves in which no zeros are left out."""

    name = 'dense'
    values_key = 'values'
    keys = frozenset({'values'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the leaf itself, unless a given mask would be lost."""
        del most_bytes
        mask = pattern.mask
        if pattern.is_given and pattern.kept < mask.size:
            return None
        values = ArraySpec(mask.shape, dtype)
        return Plan(self.name, {'values': values})

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the leaf."""
        del mask, plan
        return {'values': array}

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape of the leaf."""
        return arrays['values'].shape

    def check(self, arrays: StoredArrays) -> None:
        """Accepts any array."""

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        return arrays['values']
