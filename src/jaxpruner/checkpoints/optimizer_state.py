"""Which tensors of a checkpoint are the state of an optimizer: moments, counters, accumulated gradients.

They are told by structure, since checkpoints say nothing else of them. What lies below `opt_state` is the optimizer's.
So is what lies below a field that states of optimizers have, such as `mu` beside `nu` and `count`, where all that
stands beside it are such fields, too, and the same tree of shapes stands elsewhere: the weights. Without a counter
beside it, that tree must have several matrices and be all the weights: modules have names such as `v`, too.
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
    sum_of_squares acc_grads grad_ema ema e_g e_x z""".split()
)
# Fields that modules do not have: they count the steps.
_COUNTERS = frozenset('count step mini_step gradient_step step_count weight_sum'.split())
# Fields that hold the state of another optimizer.
_INNER = frozenset('inner_opt_state inner_state base_optimizer_state'.split())
# What may stand beside the first in a state.
_BESIDE = (
    _MIRRORS | _COUNTERS | _INNER | frozenset('skip_state ema_decay ns_coeffs b1 max_lr'.split())
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
            '' if place is None else paths[name][place],
            _weights_of(name, place, paths[name], weights, leaves),
        )
        for name, place in found.items()
    }


def _field(path: tuple[str, ...]) -> int | None:
    """Where in a path below a container the field of a state stands."""
    start = next(place for place, part in enumerate(path) if part in _CONTAINERS)
    return next((place for place in range(start + 1, len(path)) if path[place] in _MIRRORS), None)


def _states_without_container(
    paths: Mapping[str, tuple[str, ...]],
) -> dict[tuple[str, ...], list[str]]:
    """By path of a field, the tensors below it, where nothing but fields of states stands beside it."""
    children: dict[tuple[str, ...], set[str]] = {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, path in paths.items():
        for place, part in enumerate(path):
            children.setdefault(path[:place], set()).add(part)
        first = next((place for place, part in enumerate(path) if part in _MIRRORS), None)
        if first is not None:
            groups.setdefault(path[: first + 1], []).append(name)
    return {
        prefix: members for prefix, members in groups.items() if children[prefix[:-1]] <= _BESIDE
    }


def _is_mirrored(
    prefix: tuple[str, ...],
    members: list[str],
    paths: Mapping[str, tuple[str, ...]],
    leaves: Mapping[str, Leaf],
) -> bool:
    """Whether all tensors below a field have counterparts of their names and shapes below one other path."""
    state = prefix[:-1]
    shapes = {
        path: leaves[name].shape for name, path in paths.items() if path[: len(state)] != state
    }
    suffixes = {paths[name][len(prefix) :]: leaves[name].shape for name in members}
    longest = max(suffixes, key=len)
    if not longest:
        return False
    others = {path[: -len(longest)] for path in shapes if path[-len(longest) :] == longest}
    mirrored = [
        other
        for other in others
        if all(shapes.get(other + suffix) == shape for suffix, shape in suffixes.items())
    ]
    if _has_counter(state, paths):
        return bool(mirrored)
    matrices = {
        path for path, shape in shapes.items() if len(shape) > 1 and _MIRRORS.isdisjoint(path)
    }
    # Modules in a row may have such a name each: they do not prove one another.
    covered = {
        other + suffix for other in mirrored if _MIRRORS.isdisjoint(other) for suffix in suffixes
    }
    return (
        sum(len(shape) > 1 for shape in suffixes.values()) > 1
        and bool(covered)
        and matrices <= covered
    )


def _has_counter(state: tuple[str, ...], paths: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether an optimizer's counter stands in a state, or the state in that of another optimizer."""
    if not _INNER.isdisjoint(state):
        return True
    end = len(state)
    return any(
        path[:end] == state and len(path) == end + 1 and path[end] in _COUNTERS
        for path in paths.values()
    )


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
