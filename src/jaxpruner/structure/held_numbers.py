"""Widths that a module holds as numbers, such as `num_heads=4`: found by their values, and set on a smaller module."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.structure.analysis.axes import sizes_of
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
from jaxpruner.structure.graph import ChannelGraph, texts
from jaxpruner.tree import Path, PyTree


class HeldNumber(NamedTuple):
    """An attribute of a module whose value is an old width.

    Attributes:
      module: the module's path.
      attribute: its name; with the name of a field behind a dot, if it is in a configuration that the module holds.
      kind: numbers of one kind are set together, as those of equal layers are that are widths of their own arrays.
      old: the number, or a tuple of numbers that is the old shape of an array.
      new: what the width is after the cut; `None` if several widths that have this value differ then.
    """

    module: Path
    attribute: str
    kind: tuple[type, str]
    old: Any
    new: Any

    @property
    def name(self) -> str:
        """As it is written in Python."""
        return '.'.join((*self.module, self.attribute))


def find(
    graph: ChannelGraph, keep: KeepByGroup, submodules: Mapping[Path, Any]
) -> list[HeldNumber]:
    """The attributes of a module whose values are old widths of its arrays.

    A module holds the widths of its own arrays and of those below it. But the width of a group is only looked for from
    the module down that holds all members of the group.
    """
    cut = check_keep(graph.groups, keep, allow_inexact=True)
    leaves = [leaf for trace in graph.traces for leaf in (*trace.named_leaves, *trace.named_states)]
    axes_of = dict(leaves)
    news: dict[tuple[Path, Any], set[Any]] = defaultdict(set)  # of a module and an old width
    for group in graph.groups.values():
        members = [*group.members, *group.in_state]
        home = texts.shared_depth([member.path for member in members])
        for member in members:
            axis = axes_of[member.path][member.axis]
            for depth in range(home, len(member.path)):
                module = member.path[:depth]
                news[module, group.size].add(cut.size(group.atom))
                news[module, axis.size].add(cut.size(axis))
    of_own_arrays = set()
    for path, axes in leaves:
        shape = sizes_of(axes)
        of_own_arrays.update((path[:-1], width) for width in (*shape, shape))
        news[path[:-1], shape].add(cut.shape(axes))
        for axis in axes:
            for depth in range(len(path)):
                if not cut.shortens(axis):
                    news[path[:depth], axis.size].add(axis.size)
    held = []
    for path, module in submodules.items():
        for attribute, old in _numbers_of(module, submodules):
            widths = news.get((path, old), set())
            if widths - {old}:
                new = next(iter(widths)) if len(widths) == 1 else None
                kind = type(module), '' if (path, old) in of_own_arrays else attribute
                held.append(HeldNumber(path, attribute, kind, old, new))
    return held


def _numbers_of(module: Any, submodules: Mapping[Path, Any]) -> Iterator[tuple[str, Any]]:
    """The whole numbers and tuples of them that a module holds, also in configurations."""
    for name, value in vars(module).items():
        is_config = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if is_config and not any(value is other for other in submodules.values()):
            for field, inner in vars(value).items():
                if _is_width(inner):
                    yield f'{name}.{field}', inner
        elif _is_width(value):
            yield name, value


def _is_width(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_width, value))
    return isinstance(value, int) and not isinstance(value, bool)


def describe(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """A line for each number, given its name, its old value and its new one; one line for those of repeated layers.

    >>> describe({'layers.0.heads': (4, 2), 'layers.1.heads': (4, 2), 'width': (8, None)})
    ['layers.*.heads: 4 -> 2', 'width: 8 -> ?']
    """
    lines = []
    for name, (old, new) in changes.items():
        parts = ['*' if part.isdigit() else part for part in name.split('.')]
        lines.append(f'{".".join(parts)}: {old} -> {"?" if new is None else new}')
    return list(dict.fromkeys(lines))


def set_in(
    tree: PyTree,
    kind: type,
    submodules: Callable[[Any], Mapping[Path, Any]],
    numbers: Sequence[HeldNumber],
) -> PyTree:
    """Sets numbers on each module of a class in a tree whose nodes nothing else holds.

    A tree like the module, such as moments, has the structure of the module, numbers included.

    Args:
      tree: a module, or any tree.
      kind: the class.
      submodules: path -> module, of a module of this class.
      numbers: of such a module.
    """

    def is_module(node: Any) -> bool:
        return type(node) is kind

    def set_on(node: Any) -> Any:
        parts = submodules(node) if is_module(node) else {}
        for number in numbers:
            if number.module in parts:
                _set(parts[number.module], number)
        return node

    return jax.tree.map(set_on, tree, is_leaf=is_module)


def _set(module: Any, number: HeldNumber) -> None:
    """Sets a number; others may share a configuration, so that it is copied."""
    name, _, field = number.attribute.partition('.')
    new = number.new
    if field:
        new = copy.copy(getattr(module, name))
        object.__setattr__(new, field, number.new)
    object.__setattr__(module, name, new)  # modules of Equinox are frozen
