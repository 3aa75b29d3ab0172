"""Checks parameters and counts for `ChannelGraph.choose`. These mistakes would not be noticed later."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import atoms_of_values, resolve_each, sizes_of
from jaxpruner.structure.analysis.members import Group
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.cutting.cut import Cut, Lists
from jaxpruner.structure.programs import is_array
from jaxpruner.tree import Path, PyTree

Groups = Mapping[str, Group]
Counts = Mapping[str, int]


def check_params(graph: Any, params: PyTree) -> None:
    """Refuses parameters whose leaves differ from those of the model, or have no values."""
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    trace: Trace = graph.trace
    if list(paths) != list(trace.paths):
        unshared = set(paths) ^ set(trace.paths)
        names = sorted(map(tree_lib.path_string, unshared))
        raise ValueError(
            f'params are not those of the model of the graph: only one of the two has {names}'
        )
    for path, leaf, axes in zip(paths, leaves, trace.leaves, strict=True):
        name = tree_lib.path_string(path)
        shape, expected = np.shape(leaf), sizes_of(axes)
        if shape != expected:
            raise ValueError(f'{name} has shape {shape}, but {expected} in the model')
        if not is_array(leaf):
            raise TypeError(f'{name} has no values to make scores of; give arrays, outside of jit')


def check_shared(graph: Any, params: PyTree, candidates: Groups) -> None:
    """Refuses one array as two leaves that would be cut differently."""
    atoms_of_groups = [group.atom for group in candidates.values()]
    cut_atoms = set(resolve_each(atoms_of_groups))
    trace: Trace = graph.trace
    first_with: dict[int, int] = {}  # `id` of an array -> its first leaf
    for number, leaf in enumerate(jax.tree.leaves(params)):
        first = first_with.setdefault(id(leaf), number)
        own_atoms = atoms_of_values([trace.leaves[number]])
        first_atoms = atoms_of_values([trace.leaves[first]])
        are_cut = not cut_atoms.isdisjoint(own_atoms + first_atoms)
        if are_cut and own_atoms != first_atoms:
            name = tree_lib.path_string(trace.paths[number])
            first_name = tree_lib.path_string(trace.paths[first])
            raise ValueError(
                f'{first_name} and {name} are one array, but their channels are chosen separately; let the model read '
                'one leaf in both places, or copy the array (jax.tree.map(jnp.copy, params)) if they may differ'
            )


def check_shards(graph: Any, params: PyTree, counts: Counts) -> None:
    """Refuses sizes that the number of devices along an axis does not divide."""
    lists = {}
    for name, count in counts.items():
        atom = graph.groups[name].atom.resolved()
        lists[atom] = Lists((), np.arange(count))
    cut = Cut(lists)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        sharding = getattr(leaf, 'sharding', None)
        if sharding is None or sharding.is_fully_replicated:
            continue
        parts = sharding.shard_shape(leaf.shape)
        for i, axis in enumerate(graph.trace.leaves[number]):
            size_of_part = max(parts[i], 1)
            devices = leaf.shape[i] // size_of_part
            if cut.shortens(axis) and cut.size(axis) % devices:
                path = graph.trace.paths[number]
                names = _names_along(graph.groups, path, i, counts)
                raise ValueError(
                    f'{tree_lib.path_string(path)} lies on {devices} devices along axis {i}, which do not divide the '
                    f'{cut.size(axis)} of {axis.size} that stay; take multiples, round_to={{{names}: …}}'
                )


def _names_along(groups: Groups, path: Path, axis: int, counts: Counts) -> str:
    """The groups along an axis of a leaf that get smaller."""
    names = []
    for name, group in groups.items():
        members = [(member.path, member.axis) for member in group.members]
        is_cut = counts.get(name, group.size) != group.size
        if is_cut and (path, axis) in members:
            names.append(repr(name))
    return ', '.join(names)
