"""What is known of each leaf of a model before its masks are made, resolved once from the settings of a pruner."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpruner.core import tree as tree_lib
from jaxpruner.mask_calculator.groups import Groups
from jaxpruner.sparsity_types import SparsityType

# A glob or a path, or several.
Stacked = str | Sequence[str | tree_lib.Path]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a model.

    Attributes:
      path: the leaf's.
      shape: its shape, with the axis of layers where it is stacked.
      dtype: of its elements; `None` where there is no array.
      sparsity_type: which of its weights are removed together; `None` where it is dense.
      is_stacked: its first axis counts layers, each of which is ranked on its own.
      target: the share to remove in the end; `None` where it has no target, or where that is being traced.
    """

    path: tree_lib.Path
    shape: tuple[int, ...]
    dtype: Any
    sparsity_type: SparsityType | None
    is_stacked: bool
    target: float | None

    @property
    def name(self) -> str:
        """The path as text."""
        return tree_lib.path_string(self.path)

    @property
    def groups(self) -> Groups:
        """How the leaf's weights are grouped."""
        return Groups(self.sparsity_type, self.is_stacked)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of what is ranked on its own."""
        return self.groups.layer_shape(self.shape)


def leaf_of(
    path: tree_lib.Path, array: Any, sparsity_type: SparsityType | None, is_stacked: bool
) -> Leaf:
    """Describes a leaf by its array, or by its shape; it has no target yet."""
    shape = tuple(getattr(array, 'shape', ()))
    dtype = getattr(array, 'dtype', None)
    return Leaf(path, shape, dtype, sparsity_type, is_stacked, target=None)


def resolve_leaves(
    paths: Sequence[tree_lib.Path],
    arrays: Sequence[Any],
    types: Sequence[SparsityType | None],
    stacked: Stacked,
) -> list[Leaf]:
    """Describes all leaves of a model, given the sparsity type of each and the names of stacked ones."""
    names = tree_lib.as_names(stacked)
    leaves = []
    for i, path in enumerate(paths):
        is_stacked = tree_lib.matches_any(names, path)
        leaves.append(leaf_of(path, arrays[i], types[i], is_stacked))
    return leaves
