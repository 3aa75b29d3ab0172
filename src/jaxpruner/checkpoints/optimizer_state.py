"""Which tensors of a checkpoint are the state of an optimizer: moments, counters, accumulated gradients.

A checkpoint does not say so. Its structure does, in two ways:

- Whatever lies below `opt_state` or a similar name is the optimizer's.
- Elsewhere, a field that states of optimizers have, such as `mu` beside `nu` and `count`, is the optimizer's if
  everything beside it is such a field, too, and if the same tree of shapes, the weights, stands at another path.
  Modules also have names such as `v`. So without a counter beside it, the tree must have several matrices, and the
  other path must hold all matrices that are weights.
"""

import re
from collections.abc import Collection, Iterable, Mapping
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
# All fields that may stand beside a mirror.
_FIELDS = (
    _MIRRORS | _COUNTERS | _INNER | frozenset('skip_state ema_decay ns_coeffs b1 max_lr'.split())
)

_Path = tuple[str, ...]
_Shape = tuple[int, ...]


class OptimizerTensor(NamedTuple):
    """A tensor of an optimizer's state.

    >>> OptimizerTensor('mu', 'params/kernel').field
    'mu'
    """

    field: str  # of the state, '' where its name is not known
    weights: str | None  # the tensor that it belongs to, which has its shape


class _Tensor(NamedTuple):
    name: str
    path: _Path
    shape: _Shape


def find_optimizer_state(leaves: Mapping[str, Leaf]) -> dict[str, OptimizerTensor]:
    """Finds the tensors that are an optimizer's.

    Args:
      leaves: all tensors of a checkpoint; `/` and `.` in names separate levels.

    >>> import numpy as np
    >>> leaf = Leaf((2, 3), np.dtype('float32'))
    >>> find_optimizer_state({'params/kernel': leaf, 'opt_state/0/mu/kernel': leaf})
    {'opt_state/0/mu/kernel': OptimizerTensor(field='mu', weights='params/kernel')}
    """
    tensors = {
        name: _Tensor(name, tuple(re.split('[/.]', name)), leaf.shape)
        for name, leaf in leaves.items()
    }
    positions = _field_positions(tensors.values())
    weights_by_ending: dict[_Path, list[_Tensor]] = {}
    for tensor in tensors.values():
        if tensor.name not in positions:
            for start in range(len(tensor.path)):
                weights_by_ending.setdefault(tensor.path[start:], []).append(tensor)
    state = {}
    for name, position in positions.items():
        tensor = tensors[name]
        if position is None:
            state[name] = OptimizerTensor('', None)
            continue
        candidates = weights_by_ending.get(tensor.path[position + 1 :], [])
        weights = next((other.name for other in candidates if other.shape == tensor.shape), None)
        state[name] = OptimizerTensor(tensor.path[position], weights)
    return state


def _field_positions(tensors: Collection[_Tensor]) -> dict[str, int | None]:
    """Maps each tensor of a state to where in its path the field stands, `None` if no field is known."""
    positions = {}
    for tensor in tensors:
        container = _first_position(tensor.path, _CONTAINERS)
        if container is not None:
            positions[tensor.name] = _first_position(tensor.path, _MIRRORS, container + 1)
    for field, members in _fields_among_fields(tensors).items():
        if _is_mirrored(field, members, tensors):
            positions.update(dict.fromkeys([member.name for member in members], len(field) - 1))
    return positions


def _first_position(path: _Path, names: frozenset[str], start: int = 0) -> int | None:
    for position in range(start, len(path)):
        if path[position] in names:
            return position
    return None


def _fields_among_fields(tensors: Iterable[_Tensor]) -> dict[_Path, list[_Tensor]]:
    """Finds the mirrors with nothing but fields of states beside them: path of the field to the tensors below."""
    children: dict[_Path, set[str]] = {}
    members: dict[_Path, list[_Tensor]] = {}
    for tensor in tensors:
        for position, name in enumerate(tensor.path):
            children.setdefault(tensor.path[:position], set()).add(name)
        position = _first_position(tensor.path, _MIRRORS)
        if position is not None:
            members.setdefault(tensor.path[: position + 1], []).append(tensor)
    return {field: members[field] for field in members if children[field[:-1]] <= _FIELDS}


def _is_mirrored(field: _Path, members: list[_Tensor], tensors: Iterable[_Tensor]) -> bool:
    """Whether the tensors below a field have counterparts of their names and shapes below one other path."""
    state = field[:-1]
    below = {member.path[len(field) :]: member.shape for member in members}
    outside: dict[_Path, _Shape] = {}
    has_counter = not _INNER.isdisjoint(state)
    for tensor in tensors:
        if tensor.path[: len(state)] != state:
            outside[tensor.path] = tensor.shape
        elif len(tensor.path) == len(field) and tensor.path[-1] in _COUNTERS:
            has_counter = True
    roots = _roots_of_same_trees(below, outside)
    if has_counter:
        return bool(roots)
    # Modules in a row may each have a field's name: they do not prove one another.
    roots = [root for root in roots if _MIRRORS.isdisjoint(root)]
    matrices_below = [shape for shape in below.values() if len(shape) > 1]
    return len(matrices_below) > 1 and bool(roots) and _cover_matrices(roots, below, outside)


def _roots_of_same_trees(
    below: Mapping[_Path, _Shape], outside: Mapping[_Path, _Shape]
) -> list[_Path]:
    """Finds the paths outside of a state below which the same tree of shapes stands as below its field."""
    longest = max(below, key=len)
    if not longest:
        return []
    roots = []
    for path in outside:
        root = path[: -len(longest)]
        if root + longest == path and all(
            outside.get(root + suffix) == shape for suffix, shape in below.items()
        ):
            roots.append(root)
    return roots


def _cover_matrices(
    roots: list[_Path], below: Mapping[_Path, _Shape], outside: Mapping[_Path, _Shape]
) -> bool:
    """Whether all matrices outside that are weights stand below the roots."""
    matrices = set()
    for path, shape in outside.items():
        if len(shape) > 1 and _MIRRORS.isdisjoint(path):
            matrices.add(path)
    for root in roots:
        matrices.difference_update([root + suffix for suffix in below])
    return not matrices
