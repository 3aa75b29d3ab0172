"""What training on compact weights makes of each leaf, as a table."""

import dataclasses
import math
from collections.abc import Mapping

from jaxpruner import text_tables
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.text_tables import Column

_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('shape', overflow='fold'),
    Column('stored, or why it stays dense', overflow='wrap'),
    Column('kept', align='right'),
    Column('of', align='right'),
)


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """A leaf of a model that is trained on compact weights.

    Attributes:
      name: its path as text.
      shape: of the dense leaf.
      layout: its blocks, or how many weights are kept; `None` if it stays dense.
      kept: weights that are trained, with those of the term of low rank.
      note: why it stays dense, or a remark.

    >>> PlannedLeaf('bias', (4,), None, kept=4, note='no contraction reads it').size
    4
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None
    kept: int
    note: str = ''

    @property
    def size(self) -> int:
        """Weights of the dense leaf."""
        return math.prod(self.shape)

    @property
    def words(self) -> str:
        """How it is stored, or why it stays dense."""
        if self.layout is None:
            return f'dense: {self.note}'
        return f'{self.layout.words}; {self.note}' if self.note else self.layout.words


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """What becomes of the leaves of a model that is trained on blocks or on single weights; it prints as a table.

    Attributes:
      leaves: by name, in the tree's order.

    >>> plan = BlockPlan({'bias': PlannedLeaf('bias', (4,), None, kept=4, note='no contraction reads it')})
    >>> print(plan)
    leaf   shape  stored, or why it stays dense   kept  of
    ------------------------------------------------------
    bias   4      dense: no contraction reads it     4   4
    ------------------------------------------------------
    total         sparsity 0                         4   4
    """

    leaves: Mapping[str, PlannedLeaf]

    @property
    def kept(self) -> int:
        """Weights that are trained."""
        return sum(leaf.kept for leaf in self.leaves.values())

    @property
    def size(self) -> int:
        """Weights of the dense model."""
        return sum(leaf.size for leaf in self.leaves.values())

    def __str__(self) -> str:
        leaves = list(self.leaves.values())
        alike = [(leaf.shape, leaf.words) for leaf in leaves]
        rows = []
        for name, indices in text_tables.group_layers(list(self.leaves), alike):
            shape, words = alike[indices[0]]
            kept = sum(leaves[i].kept for i in indices)
            size = sum(leaves[i].size for i in indices)
            rows.append([name, '×'.join(map(str, shape)), words, f'{kept:,}', f'{size:,}'])
        sparsity = 1 - self.kept / max(self.size, 1)
        total = ['total', '', f'sparsity {sparsity:.4g}', f'{self.kept:,}', f'{self.size:,}']
        return text_tables.to_text(_COLUMNS, rows, total)
