"""Makes a module with smaller arrays, and checks that its own code follows them.

A module's code may hold widths as numbers: `x.reshape(n, self.num_heads, -1)`. It may also compute numbers from its new
widths where the zeroed model has the old ones, such as the mean of a LayerNorm. So the module runs on the inputs, and
has to give what the whole module gives with zeros at the removed channels. If it does not, the numbers that it holds
are set to the new widths.
"""

import copy
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.structure import small_model
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.cut import KeepByGroup, check_keep
from jaxpruner.structure.graph import ChannelGraph, shared_depth
from jaxpruner.structure.modules import ModelArrays
from jaxpruner.tree import Path, PyTree

_MOST_NUMBERS = 6  # in a message


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


def find_numbers(
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
        home = shared_depth([member.path for member in members])
        for member in members:
            axis = axes_of[member.path][member.axis]
            for depth in range(home, len(member.path)):
                for each in (group.atom, axis):
                    news[member.path[:depth], each.size].add(cut.size(each))
    of_own_arrays = set()
    for path, axes in leaves:
        shape = sizes_of(axes)
        of_own_arrays.update((path[:-1], width) for width in (*shape, shape))
        news[path[:-1], shape].add(cut.shape(axes))
        for axis in axes:
            for depth in range(0 if cut.shortens(axis) else len(path)):
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

    def is_width(value: Any) -> bool:
        if isinstance(value, tuple):
            return bool(value) and all(map(is_width, value))
        return isinstance(value, int) and not isinstance(value, bool)

    for name, value in vars(module).items():
        is_config = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if is_config and not any(value is other for other in submodules.values()):
            for field, inner in vars(value).items():
                if is_width(inner):
                    yield f'{name}.{field}', inner
        elif is_width(value):
            yield name, value


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


def set_numbers(
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
            if number.module not in parts:
                continue
            module = parts[number.module]
            name, _, field = number.attribute.partition('.')
            new = number.new
            if field:  # others may share a configuration, so that it is copied
                new = copy.copy(getattr(module, name))
                object.__setattr__(new, field, number.new)
            object.__setattr__(module, name, new)  # modules of Equinox are frozen
        return node

    return jax.tree.map(set_on, tree, is_leaf=is_module)


class _Trial(NamedTuple):
    """A module with smaller arrays that was run.

    Attributes:
      numbers: that were set on it.
      error: the largest difference from the results of the zeroed module; infinite if it does not run.
      fault: what is wrong; empty if the results are the same.
    """

    numbers: Sequence[HeldNumber]
    error: float
    fault: str


class ShrunkModules:
    """Modules with smaller arrays, run on the inputs of a graph.

    Args:
      arrays: of the whole module.
      graph: of the whole module.
    """

    def __init__(self, arrays: ModelArrays, graph: ChannelGraph):
        self._arrays = arrays
        self._graph = graph
        self._whole = [arrays.params] if arrays.state is None else [arrays.params, arrays.state]
        self._results = self._run(arrays.apply, self._whole)

    def numbers(self, keep: KeepByGroup, allow_inexact: bool) -> Sequence[HeldNumber]:
        """The numbers that have to be set on the smaller module.

        Raises:
          ValueError: its code does not follow the arrays. If inexact groups are allowed, it is enough that it runs.
        """
        trial = self._best_trial(keep)
        if not trial.fault or (allow_inexact and trial.error < math.inf):
            return trial.numbers
        # Groups of repeated layers are tried together.
        families: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, kept in keep.items():
            families[re.sub(r'(?<![^/])\d+(?=/)', '*', name)][name] = kept
        faults = {}
        for glob, family in families.items():
            fault = self._best_trial(family).fault
            if fault:
                name = glob if len(family) > 1 else next(iter(family))
                faults[name] = f'{name}: {fault}{self._describe_held(family)}'
        if not faults:  # only together
            faults = dict.fromkeys(keep, f'{trial.fault}{self._describe_held(keep)}')
        remedies = [
            f'leave={list(faults)} keeps these groups whole',
            'the pair (apply_fn, params) has no code of its own that has to follow',
        ]
        if trial.error < math.inf:
            remedies.append('allow_inexact=True takes the module as it is, to be trained on')
        name = type(self._make((), *self._whole)).__name__
        first = f'the code of {name} does not follow its smaller arrays'
        lines = dict.fromkeys(faults.values())
        raise ValueError('\n'.join([first, *lines, '; '.join(remedies)]))

    def module(self, keep: KeepByGroup, numbers: Sequence[HeldNumber]) -> Any:
        """The module with smaller arrays and these numbers."""
        return self._make(numbers, *self._shrink_each(keep))

    def _make(self, numbers: Sequence[HeldNumber], params: PyTree, state: PyTree = None) -> Any:
        module = self._arrays.make(params, state)
        return set_numbers(module, type(module), self._arrays.submodules, numbers)

    def _shrink_each(self, keep: KeepByGroup) -> list[PyTree]:
        graph = self._graph
        return [graph.shrink(tree, keep, allow_inexact=True, verify=False) for tree in self._whole]

    def _run(self, apply: Callable[..., Any], trees: Sequence[PyTree]) -> Any:
        with jax.default_matmul_precision('highest'):
            return jax.jit(apply)(*trees, *self._arrays.inputs)

    def _apply_with(self, numbers: Sequence[HeldNumber]) -> Callable[..., Any]:
        def apply(params: PyTree, *arguments: Any) -> Any:
            state, inputs = self._arrays.split(arguments)
            return self._arrays.run(self._make(numbers, params, state), state, *inputs)

        return apply

    def _held(self, keep: KeepByGroup) -> list[HeldNumber]:
        module = self._make((), *self._whole)
        return find_numbers(self._graph, keep, self._arrays.submodules(module))

    def _describe_held(self, keep: KeepByGroup) -> str:
        numbers = sorted(self._held(keep), key=lambda number: len(number.module))
        texts = describe({number.name: (number.old, number.new) for number in numbers})
        if len(texts) > _MOST_NUMBERS:
            texts[_MOST_NUMBERS:] = [f'and {len(texts) - _MOST_NUMBERS} more']
        return f'; it holds {", ".join(texts)}' if texts else ''

    def _best_trial(self, keep: KeepByGroup) -> _Trial:
        """Sets no numbers if the module follows without, else those that change its program."""
        zeroed = [self._graph.zeroed(tree, keep, allow_inexact=True) for tree in self._whole]
        small = self._shrink_each(keep)
        small_apply = small_model.SmallApply(self._graph, 0, keep, allow_inexact=True)
        expected = small_apply.cut_results(self._run(self._arrays.apply, zeroed))
        whole = small_apply.cut_results(self._results)
        precision = small_model.coarsest_precision(small_apply.program)

        def attempt(numbers: Sequence[HeldNumber]) -> _Trial:
            try:
                results = jax.tree.leaves(self._run(self._apply_with(numbers), small))
            except Exception as error:  # whatever the module's code raises
                first_line = str(error).partition('\n')[0]
                return _Trial(numbers, math.inf, f'{type(error).__name__}: {first_line}')
            shapes = [[array.shape for array in arrays] for arrays in (results, expected)]
            if shapes[0] != shapes[1]:
                return _Trial(numbers, math.inf, f'it returns {shapes[0]} instead of {shapes[1]}')
            comparison = small_model.compare(whole, expected, results, precision)
            fault = ''
            if comparison.verdict == 'different':
                fault = (
                    f'its results differ by {comparison.error:.3g} from those with zeros, which the removal changes '
                    f'by {comparison.change:.3g}'
                )
            return _Trial(numbers, comparison.error, fault)

        def program(numbers: Sequence[HeldNumber]) -> str:
            try:
                text = str(jax.make_jaxpr(self._apply_with(numbers))(*small, *self._arrays.inputs))
            except Exception:
                return ''
            return re.sub(r'0x[0-9a-f]+', '', text)

        unchanged = attempt(())
        numbers = [number for number in self._held(keep) if number.new is not None]
        if not unchanged.fault or not numbers:
            return unchanged
        best = min(attempt(numbers), unchanged, key=lambda trial: trial.error)
        if best is unchanged or best.error == math.inf:
            return best
        with_all = program(numbers)
        for kind in dict.fromkeys(number.kind for number in numbers):
            fewer = [number for number in numbers if number.kind != kind]
            if program(fewer) == with_all:
                numbers = fewer
        return best._replace(numbers=numbers)
