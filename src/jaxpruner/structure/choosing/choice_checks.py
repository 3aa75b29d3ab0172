"""What `ChannelGraph.choose` refuses of the parameters and of the counts: nothing of it would be noticed later."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, sizes_of
from jaxpruner.structure.analysis.members import Group
from jaxpruner.structure.cutting.cut import Cut, Lists
from jaxpruner.structure.programs import is_array

Groups = Mapping[str, Group]
Counts = Mapping[str, int]


def check_params(graph: Any, params: tree_lib.PyTree) -> None:
    """Refuses what has other leaves than the model."""
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    if list(paths) != list(graph.trace.paths):
        own = sorted(map(tree_lib.path_string, set(paths) ^ set(graph.trace.paths)))
        raise ValueError(
            f'params are those of another model than the graph: one of them alone has {own}'
        )
    for path, leaf, axes in zip(paths, leaves, graph.trace.leaves, strict=True):
        name = tree_lib.path_string(path)
        shape = sizes_of(axes)
        if np.shape(leaf) != shape:
            raise ValueError(f'{name} has shape {np.shape(leaf)}, and {shape} in the model')
        if not is_array(leaf):
            raise TypeError(
                f'{name} has no values, which scores are made of; give arrays, outside of jit'
            )


def check_shared(graph: Any, params: tree_lib.PyTree, candidates: Groups) -> None:
    """Refuses one array for two leaves that would be cut in different ways."""
    cut_atoms = {group.atom.resolved() for group in candidates.values()}
    first: dict[int, int] = {}
    for number, leaf in enumerate(jax.tree.leaves(params)):
        other = first.setdefault(id(leaf), number)
        axes, other_axes = graph.trace.leaves[number], graph.trace.leaves[other]
        own_atoms, other_atoms = _atoms_along(axes), _atoms_along(other_axes)
        are_cut = not cut_atoms.isdisjoint(own_atoms + other_atoms)
        if are_cut and own_atoms != other_atoms:
            name = tree_lib.path_string(graph.trace.paths[number])
            other_name = tree_lib.path_string(graph.trace.paths[other])
            raise ValueError(
                f'{other_name} and {name} are one array, and their channels are chosen apart; let the model read one '
                'leaf in both places, or copy the array (jax.tree.map(jnp.copy, params)) if they need not stay equal'
            )


def _atoms_along(axes: Axes) -> list[Axis]:
    found = []
    for axis in axes:
        found += atoms(axis)
    return found


def check_shards(graph: Any, params: tree_lib.PyTree, counts: Counts) -> None:
    """Refuses sizes that the devices of an axis do not divide."""
    lists = {}
    for name, count in counts.items():
        lists[graph.groups[name].atom.resolved()] = Lists((), np.arange(count))
    cut = Cut(lists)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        sharding = getattr(leaf, 'sharding', None)
        if sharding is None or sharding.is_fully_replicated:
            continue
        parts = sharding.shard_shape(leaf.shape)
        for i, axis in enumerate(graph.trace.leaves[number]):
            devices = leaf.shape[i] // max(parts[i], 1)
            if cut.size(axis) != axis.size and cut.size(axis) % devices:
                path = graph.trace.paths[number]
                names = _names_along(graph.groups, path, i, counts)
                raise ValueError(
                    f'{tree_lib.path_string(path)} lies on {devices} devices along axis {i}, which do not divide the '
                    f'{cut.size(axis)} of {axis.size} that stay; take multiples, round_to={{{names}: …}}'
                )


def _names_along(groups: Groups, path: tree_lib.Path, axis: int, counts: Counts) -> str:
    """The groups along an axis of a leaf that get smaller."""
    names = []
    for name, group in groups.items():
        is_along = any(member.path == path and member.axis == axis for member in group.members)
        if is_along and counts.get(name, group.size) != group.size:
            names.append(repr(name))
    return ', '.join(names)
