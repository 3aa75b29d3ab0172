"""The setting `only`, which says which leaves are trained on compact weights."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training.layouts import NoLayoutError

Names = str | Sequence[str | tree_lib.Path]
_MOST_LISTED = 8


class OnlySetting(NamedTuple):
    """The setting `only`, checked.

    Attributes:
      names: names or globs of leaves; `None` if all matrices are meant.
    """

    names: tuple[str | tree_lib.Path, ...] | None

    @classmethod
    def of(cls, only: Names | None, products: Products) -> 'OnlySetting':
        """Reads the setting for a model.

        Raises:
          ValueError: a name means no leaf, or only leaves that are no matrices.
        """
        if only is None:
            return cls(None)
        names = tree_lib.as_names(only)
        paths = [matrix_leaf.path for matrix_leaf in products.by_leaf.values()]
        refused = {tuple(leaf.split('/')): leaf for leaf in products.refused}
        tree_lib.check_names(names, [*paths, *refused], 'only')
        for name in names:
            if any(tree_lib.matches(name, path) for path in paths):
                continue
            path = next(path for path in refused if tree_lib.matches(name, path))
            leaf = refused[path]
            reason = products.refused[leaf]
            raise ValueError(
                f'only: {name!r} cannot be trained on compact weights: {leaf}: {reason}'
            )
        return cls(names)

    def names_in_full(self, path: tree_lib.Path) -> bool:
        """Whether a leaf is named itself, and not by a glob."""
        if self.names is None:
            return False
        return path in self.names or tree_lib.path_string(path) in self.names

    def checked_sparsity(self, matrix_leaf: MatrixLeaf, sparsity: float | None) -> float:
        """The sparsity of a leaf, if the leaf is meant and has one.

        Raises:
          NoLayoutError: the leaf stays dense.
        """
        if self.names is not None and not tree_lib.matches_any(self.names, matrix_leaf.path):
            raise NoLayoutError('no name in only matches it')
        if not sparsity:
            raise NoLayoutError('its sparsity is 0' if sparsity == 0 else 'it has no sparsity')
        return sparsity

    def check_convolution(self, matrix_leaf: MatrixLeaf) -> None:
        """Refuses a convolution.

        Raises:
          NoLayoutError: the leaf stays dense.
        """
        if matrix_leaf.op == 'conv':
            raise NoLayoutError('it is a convolution; those are trained dense, or under masks')


def first_reasons(reasons: Mapping[str, str]) -> str:
    """The first leaves that stay dense, with their reasons, for a message."""
    texts = [f'{name}: {reason}' for name, reason in reasons.items()]
    return '; '.join(texts[:_MOST_LISTED])
