"""Which training of a sweep: an algorithm at a sparsity with a seed."""

from typing import NamedTuple


class CellKey(NamedTuple):
    """One training of a sweep."""

    algorithm: str
    sparsity: float
    seed: int

    @property
    def name(self) -> str:
        """As its files are called."""
        return f'{self.algorithm}_{self.sparsity}_{self.seed}'
