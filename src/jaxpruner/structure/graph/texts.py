"""What a graph of channels says of itself: its table, and why an axis stays."""

from collections.abc import Sequence
from typing import Any

from jaxpruner.core import text_tables
from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, Pin, atoms
from jaxpruner.structure.analysis.members import Group, PinnedAxis
from jaxpruner.structure.analysis.records import Trace

_COLUMNS = (
    text_tables.Column('group', overflow='fold'),
    text_tables.Column('channels', align='right'),
    text_tables.Column('parameters', align='right'),
    text_tables.Column('exact'),
    text_tables.Column('members', overflow='wrap'),
)
_MOST_MEMBERS = 6  # in a row of the table


def table(graph: Any) -> str:
    """The groups of a graph, and what stays."""
    lines = []
    if graph.groups:
        rows = list(map(_row, graph.groups.values()))
        lines.append(text_tables.to_text(_COLUMNS, rows))
    else:
        lines.append('no channels can be removed')
    for group in graph.groups.values():
        if not group.exact:
            lines.append(f'{group.name} is not exact: {group.reason}')
    lines.append(f'{len(graph.pinned)} axes stay as they are; graph.explain(leaf, axis) says why')
    for path in graph.unused:
        lines.append(f'{tree_lib.path_string(path)} has no part in the results')
    return '\n'.join(lines)


def explain(graph: Any, leaf: tree_lib.Path | str, axis: int) -> str:
    """Says what is known of an axis of a leaf; see `ChannelGraph.explain`."""
    number = _leaf_number(graph.trace, leaf)
    axes = graph.trace.leaves[number]
    path = graph.trace.paths[number]
    name = tree_lib.path_string(path)
    if not -len(axes) <= axis < len(axes):
        raise ValueError(f'{name} has {len(axes)} axes, so that there is no axis {axis}')
    axis %= len(axes)
    if path in graph.unused:
        return f'{name}[{axis}]: the leaf has no part in the results of the model'
    lines = []
    for group in graph.groups.values():
        if any(member.path == path and member.axis == axis for member in group.members):
            lines.append(_describe(group, f'{name}[{axis}]'))
    for pinned in graph.pinned:
        if pinned.path == path and pinned.axis == axis:
            part = '' if pinned.size == axes[axis].size else f' from {pinned.offset} on'
            text = f'{name}[{axis}]{part}, {pinned.size} channels, stays: {pinned.pin}'
            lines += [text, *_tied(graph.trace, number, axis, pinned)]
    return '\n'.join(lines) or f'{name}[{axis}] has {axes[axis].size} element'


def _leaf_number(trace: Trace, leaf: tree_lib.Path | str) -> int:
    for number, path in enumerate(trace.paths):
        if leaf in (path, tree_lib.path_string(path)):
            return number
    names = map(tree_lib.path_string, trace.paths)
    raise KeyError(f'no parameter {leaf!r}; {tree_lib.nearest(str(leaf), names)}')


def _tied(trace: Trace, number: int, axis: int, pinned: PinnedAxis) -> list[str]:
    """A line that names the leaves' axes with an atom in common."""
    own = _pinned_atoms(trace.leaves[number][axis], pinned.pin)
    others = []
    for other, (path, axes) in enumerate(zip(trace.paths, trace.leaves, strict=True)):
        for i, each in enumerate(axes):
            if (other, i) != (number, axis) and own & set(atoms(each)):
                others.append(f'{tree_lib.path_string(path)}[{i}]')
    return [f'  tied to {", ".join(others)}'] if others else []


def _row(group: Group) -> Sequence[str]:
    exact = 'yes' if group.exact else 'no'
    return group.name, str(group.size), f'{group.parameters:,}', exact, _members(group)


def _members(group: Group) -> str:
    """The leaves of a group, without the beginning of their paths that they share."""
    paths = list(dict.fromkeys(member.path for member in group.members))
    depth = 0
    shortest = min(map(len, paths)) - 1
    while depth < shortest and len({path[depth] for path in paths}) == 1:
        depth += 1
    names = [tree_lib.path_string(path[depth:]) for path in paths]
    if len(names) > _MOST_MEMBERS:
        names[_MOST_MEMBERS:] = [f'and {len(names) - _MOST_MEMBERS} more']
    return ', '.join(names)


def _describe(group: Group, place: str) -> str:
    others = []
    for member in group.members:
        name = f'{member.name}[{member.axis}]'
        if name != place:
            others.append(name)
    tied = f', with {", ".join(dict.fromkeys(others))}' if others else ''
    exact = 'exact' if group.exact else f'not exact: {group.reason}'
    if group.lists:
        sizes = ' x '.join([str(owner.size) for owner in group.lists])
        exact += f'; {sizes} lists of channels may differ'
    return f'{place} can be cut in group {group.name}, {group.size} channels{tied}; {exact}'


def _pinned_atoms(axis: Axis, pin: Pin | None) -> set[Axis]:
    return {each for each in atoms(axis) if each.pin is pin and each.size > 1}
