"""The check of algorithms whose regrown weights start at zero: they refuse channels removed from all leaves."""

from typing import Any

from jaxpruner.sparsity_types import is_joint


def check_not_joint(pruner: Any, sparsity_type: Any, where: str) -> None:
    """Refuses types that remove a channel from all leaves, for an algorithm whose regrown weights start at zero.

    What makes such a channel and what reads it are zero together, so that all of its gradients are: nothing tells which
    one to grow, and a regrown one would not be trained.
    """
    if is_joint(sparsity_type):
        raise ValueError(
            f'{where}{type(pruner).__name__} lets channels come back at zero, where all of their gradients are zero '
            f'with {sparsity_type!r}; use MagnitudePruning or SaliencyPruning with a PolynomialSchedule'
        )
