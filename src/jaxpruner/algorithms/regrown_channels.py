"""The check of algorithms that let weights come back: they refuse channels that are removed from all leaves."""

from typing import Any

from jaxpruner.sparsity_types.base import is_joint


def check_not_joint(updater: Any, sparsity_type: Any, where: str) -> None:
    """Refuses types that remove a channel from all leaves, for an algorithm that lets weights come back at zero.

    What makes such a channel and what reads it are zero together, so that all of its gradients are: nothing tells which
    one should come back, and one that came back would not be trained.
    """
    if is_joint(sparsity_type):
        raise ValueError(
            f'{where}{type(updater).__name__} lets channels come back at zero, where all of their gradients are zero '
            f'with {sparsity_type!r}; use MagnitudePruning or SaliencyPruning with a PolynomialSchedule'
        )
