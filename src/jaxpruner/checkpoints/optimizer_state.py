"""Which tensors of a checkpoint are the state of an optimizer: moments, counters, accumulated gradients.

A checkpoint does not say so. Its names do, in two ways:

- Whatever lies below `opt_state` or a similar name is the optimizer's.
- Elsewhere, a field of optax's states, such as `mu` beside `nu` and `count`, is the optimizer's if all that stands
  beside it is such a field, too, and if a tensor of its name and shape, the weights, stands at another path.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxpruner.checkpoints.reading import Leaf

# Keras calls its own `optimizer_variables`.
_CONTAINERS = frozenset(
    'opt_state opt_states optimizer_state optimizer_states optim_state optimizer_variables'.split()
)
# Fields of optax's states whose values have the shapes of the weights.
_MOMENTS = frozenset('mu nu nu_max trace ema e_g e_x sum_of_squares acc_grads z'.split())
# Modules may have these names, too: only a counter beside them shows that they are moments.
_AMBIGUOUS = frozenset('mu ema z'.split())
_COUNTERS = frozenset('count mini_step gradient_step step_count weight_sum'.split())
_OTHER_FIELDS = frozenset(
    'inner_opt_state inner_state base_optimizer_state skip_state ns_coeffs b1 max_lr v v_row v_col'.split()
)
_FIELDS = _MOMENTS | _COUNTERS | _OTHER_FIELDS


class OptimizerTensor(NamedTuple):
    """A tensor of an optimizer's state.

    >>> OptimizerTensor('mu', 'params/kernel').field
    'mu'
    """

    field: str  # of the state, '' where its name is not known
    weights: str | None  # the tensor that it belongs to, which has its shape


def find_optimizer_state(leaves: Mapping[str, Leaf]) -> dict[str, OptimizerTensor]:
    """Finds the tensors that are an optimizer's.

    Args:
      leaves: all tensors of a checkpoint; `/` and `.` in names separate levels.

    >>> import numpy as np
    >>> leaf = Leaf((2, 3), np.dtype('float32'))
    >>> find_optimizer_state({'params/kernel': leaf, 'opt_state/0/mu/kernel': leaf})
    {'opt_state/0/mu/kernel': OptimizerTensor(field='mu', weights='params/kernel')}
    """
    paths = {name: tuple(re.split('[/.]', name)) for name in leaves}
    children: dict[tuple[str, ...], set[str]] = {}
    for path in paths.values():
        for position, part in enumerate(path):
            children.setdefault(path[:position], set()).add(part)
    # Where in its path the field of a tensor stands that may be an optimizer's; `None` if no field is known.
    positions: dict[str, int | None] = {}
    for name, path in paths.items():
        position = next((i for i, part in enumerate(path) if part in _MOMENTS), None)
        if _CONTAINERS.isdisjoint(path):
            beside = set() if position is None else children[path[:position]]
            is_ambiguous = not beside.isdisjoint(_AMBIGUOUS) and beside.isdisjoint(_COUNTERS)
            if not beside or not beside <= _FIELDS or is_ambiguous:
                continue
        positions[name] = position
    weights_of: dict[tuple, str] = {}
    for name, path in paths.items():
        if name not in positions:
            for start in range(len(path)):
                weights_of.setdefault((path[start:], leaves[name].shape), name)
    state = {}
    for name, position in positions.items():
        path = paths[name]
        field, weights = '', None
        if position is not None:
            field = path[position]
            weights = weights_of.get((path[position + 1 :], leaves[name].shape))
        if weights is not None or not _CONTAINERS.isdisjoint(path):
            state[name] = OptimizerTensor(field, weights)
    return state
