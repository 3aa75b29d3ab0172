"""Optimizers that would not take the step of the masked dense model, refused by name."""

from typing import Any

import jax
import optax

from jaxpruner.core import optimizer_state

# What an optimizer keeps -> its name, for those that look at the shape of a leaf, or at several weights at once.
_SHAPED_STATES = {
    'FactoredState': 'adafactor',
    'GaLoreState': 'galore',
    'MuonState': 'muon',
    'ScaleBySM3State': 'sm3',
    'ScaleByLBFGSState': 'lbfgs',
}


def check_optimizer(tx: optax.GradientTransformation, weights: Any, moves_blocks: bool) -> None:
    """Refuses an optimizer that cannot train compact weights; computes nothing.

    Args:
      tx: the optimizer.
      weights: compact weights, or their shapes.
      moves_blocks: whether moments have to be set to zero now and then.

    Raises:
      ValueError: it looks at shapes, or its moments cannot be set to zero.
    """
    state = jax.eval_shape(tx.init, weights)
    for node in _nodes(state):
        name = _SHAPED_STATES.get(type(node).__name__)
        if name is not None:
            raise ValueError(
                f'optimizer: {name} looks at the shape of a leaf, and compact weights have another one than the leaf '
                'they stand for; use an elementwise optimizer, such as sgd, adam, adamw or lion'
            )
    if moves_blocks:
        optimizer_state.check_resettable(tx, weights)


def _nodes(state: Any) -> list[Any]:
    """All named tuples of a state, however deep."""
    found = []

    def visit(node: Any) -> bool:
        if hasattr(node, '_fields'):
            found.append(node)
        return False

    jax.tree.flatten(state, is_leaf=visit)
    return found
