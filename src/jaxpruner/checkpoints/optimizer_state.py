"""Which tensors of a checkpoint are the state of an optimizer: moments, counters, accumulated gradients.

They are told by structure, since checkpoints say nothing else of them. What lies below `opt_state` is the optimizer's.
So is what lies below a field that states of optimizers have, such as `mu` beside `nu` and `count`, where all that
stands beside it are such fields, too, and the same tree of shapes stands elsewhere: the weights.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxpruner.checkpoints.base import Leaf

_CONTAINERS = frozenset(
    'opt_state opt_states optimizer_state optimizer_states optim_state optimizer_state_dict'.split()
)
# Fields whose values have the shapes of the weights.
_MIRRORS = frozenset(
    """mu nu nu_max trace m v v_row v_col exp_avg exp_avg_sq max_exp_avg_sq momentum momentum_buffer velocity
    sum_of_squares acc_grads grad_ema""".split()
)
# What may stand beside them in a state.
_BESIDE = _MIRRORS | frozenset(
    'count step mini_step gradient_step inner_opt_state inner_state skip_state ema_decay'.split()
)


class OptimizerTensor(NamedTuple):
    """A tensor of an optimizer's state.

    >>> OptimizerTensor('mu', 'params/kernel').field
    'mu'
    """

    field: str  # of the state, '' where it has no name that is known
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
    found = {name: _field(path) for name, path in paths.items() if not _CONTAINERS.isdisjoint(path)}
    for prefix, members in _states_without_container(paths).items():
        if _is_mirrored(prefix, members, paths, leaves):
            found.update({name: len(prefix) - 1 for name in members})
    weights = _by_ending({name: path for name, path in paths.items() if name not in found})
    return {
        name: OptimizerTensor(
            '' if place is None else paths[name][place], _weights_of(name, place, paths[name], weights, leaves)
        )
        for name, place in found.items()
    }


def _field(path: tuple[str, ...]) -> int | None:
    """Where in a path below a container the field of a state stands."""
    start = next(place for place, part in enumerate(path) if part in _CONTAINERS)
    return next((place for place in range(start + 1, len(path)) if path[place] in _MIRRORS), None)


def _states_without_container(paths: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """By path of a field, the tensors below it, where nothing but fields of states stands beside it."""
    children: dict[tuple[str, ...], set[str]] = {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, path in paths.items():
        for place, part in enumerate(path):
            children.setdefault(path[:place], set()).add(part)
        first = next((place for place, part in enumerate(path) if part in _MIRRORS), None)
        if first is not None:
            groups.setdefault(path[: first + 1], []).append(name)
    return {prefix: members for prefix, members in groups.items() if children[prefix[:-1]] <= _BESIDE}


def _is_mirrored(
    prefix: tuple[str, ...],
    members: list[str],
    paths: Mapping[str, tuple[str, ...]],
    leaves: Mapping[str, Leaf],
) -> bool:
    """Whether all tensors below a field have counterparts of their names and shapes below one other path."""
    state = prefix[:-1]
    shapes = {path: leaves[name].shape for name, path in paths.items() if path[: len(state)] != state}
    suffixes = {paths[name][len(prefix) :]: leaves[name].shape for name in members}
    longest = max(suffixes, key=len)
    if not longest:
        return False
    others = {path[: -len(longest)] for path in shapes if path[-len(longest) :] == longest}
    return any(all(shapes.get(other + suffix) == shape for suffix, shape in suffixes.items()) for other in others)


def _by_ending(paths: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """The names of the paths that end in each way."""
    endings: dict[tuple[str, ...], list[str]] = {}
    for name, path in paths.items():
        for place in range(len(path)):
            endings.setdefault(path[place:], []).append(name)
    return endings


def _weights_of(
    name: str,
    place: int | None,
    path: tuple[str, ...],
    weights: Mapping[tuple[str, ...], list[str]],
    leaves: Mapping[str, Leaf],
) -> str | None:
    """The tensor outside the state whose name ends alike and whose shape is the same."""
    if place is None:
        return None
    alike = weights.get(path[place + 1 :], [])
    return next((other for other in alike if leaves[other].shape == leaves[name].shape), None)
