"""The texts of a `ChannelGraph`: its table, and what `explain` says of an axis."""

from collections.abc import Sequence
from typing import Any

from jaxpruner import text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, Pin, atoms, sizes_of
from jaxpruner.structure.analysis.members import Group, PinnedAxis
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.tree import Path

_COLUMNS = (
    text_tables.Column('group', overflow='fold'),
    text_tables.Column('channels', align='right'),
    text_tables.Column('parameters', align='right'),
    text_tables.Column('exact'),
    text_tables.Column('members', overflow='wrap'),
)
_MOST_MEMBERS = 6  # in a row of the table


def table(graph: Any) -> str:
    """A table of the groups, and lines about what stays."""
    lines = ['no channels can be removed']
    groups = list(graph.groups.values())
    if groups:
        rows = list(map(_row, groups))
        lines = [text_tables.to_text(_COLUMNS, rows)]
    for group in groups:
        if not group.exact:
            lines.append(f'{group.name} is not exact: {group.reason}')
    lines.append(f'{len(graph.pinned)} axes stay as they are; graph.explain(leaf, axis) says why')
    for path in graph.unused:
        lines.append(f'{tree_lib.path_string(path)} has no part in the results')
    return '\n'.join(lines)


def explain(graph: Any, leaf: Path | str, axis: int) -> str:
    """Describes an axis of a leaf; see `ChannelGraph.explain`."""
    number = _leaf_number(graph.trace, leaf)
    axes = graph.trace.leaves[number]
    path = graph.trace.paths[number]
    name = tree_lib.path_string(path)
    if not -len(axes) <= axis < len(axes):
        raise ValueError(f'{name} has {len(axes)} axes, so there is no axis {axis}')
    axis %= len(axes)
    if path in graph.unused:
        return f'{name}[{axis}]: the leaf has no part in the results of the model'
    lines = []
    size = axes[axis].size
    for group in graph.groups.values():
        members = [(member.path, member.axis) for member in group.members]
        if (path, axis) in members:
            lines.append(_describe(group, f'{name}[{axis}]'))
    for pinned in graph.pinned:
        if (pinned.path, pinned.axis) == (path, axis):
            part = '' if pinned.size == size else f' from {pinned.offset} on'
            lines.append(f'{name}[{axis}]{part}, {pinned.size} channels, stays: {pinned.pin}')
            lines += _name_tied(graph.trace, number, axis, pinned)
    return '\n'.join(lines) or f'{name}[{axis}] has {size} element'


def _leaf_number(trace: Trace, leaf: Path | str) -> int:
    for number, path in enumerate(trace.paths):
        if leaf in (path, tree_lib.path_string(path)):
            return number
    names = map(tree_lib.path_string, trace.paths)
    nearest = tree_lib.nearest(str(leaf), names)
    raise KeyError(f'no parameter {leaf!r}; {nearest}')


def _name_tied(trace: Trace, leaf: int, axis: int, pinned: PinnedAxis) -> list[str]:
    """A line that names the axes which share an atom with a pinned one; no line if there are none."""
    own_atoms = _pinned_atoms(trace.leaves[leaf][axis], pinned.pin)
    names = []
    for other, axes in enumerate(trace.leaves):
        path = tree_lib.path_string(trace.paths[other])
        for i, other_axis in enumerate(axes):
            is_same = (other, i) == (leaf, axis)
            if not is_same and not own_atoms.isdisjoint(atoms(other_axis)):
                names.append(f'{path}[{i}]')
    return [f'  tied to {", ".join(names)}'] if names else []


def _row(group: Group) -> Sequence[str]:
    exact = 'yes' if group.exact else 'no'
    counts = str(group.size), f'{group.parameters:,}'
    return group.name, *counts, exact, _name_members(group)


def _name_members(group: Group) -> str:
    """The names of a group's leaves, without the first parts that all their paths share."""
    all_paths = [member.path for member in group.members]
    paths = list(dict.fromkeys(all_paths))
    shared = shared_depth(paths)
    names = [tree_lib.path_string(path[shared:]) for path in paths]
    if len(names) > _MOST_MEMBERS:
        names[_MOST_MEMBERS:] = [f'and {len(names) - _MOST_MEMBERS} more']
    return ', '.join(names)


def shared_depth(paths: Sequence[Path]) -> int:
    """How many first parts all paths share; the last part of a path is never shared."""
    depth = 0
    parents = [path[:-1] for path in paths]
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        depth += 1
    return depth


def _describe(group: Group, own_name: str) -> str:
    all_names = [f'{member.name}[{member.axis}]' for member in group.members]
    names = dict.fromkeys(all_names)
    names.pop(own_name)
    tied = f', with {", ".join(names)}' if names else ''
    exact = 'exact' if group.exact else f'not exact: {group.reason}'
    if group.lists:
        sizes = ' x '.join(map(str, sizes_of(group.lists)))
        exact += f'; {sizes} lists of channels may differ'
    return f'{own_name} can be cut in group {group.name}, {group.size} channels{tied}; {exact}'


def _pinned_atoms(axis: Axis, pin: Pin | None) -> set[Axis]:
    pinned = set()
    for atom in atoms(axis):
        if atom.pin is pin and atom.size > 1:
            pinned.add(atom)
    return pinned
