"""Finds the constructor arguments that make a module of smaller widths.

The module tells nothing of how its arguments become widths, and needs not: it is built with changed arguments, in
shapes alone, until every leaf has the shape that the smaller model has. Shapes do not tell 2 heads of 4 features from 1
head of 8, so that the program is compared with that of the smaller model, too.

The search goes from one axis that is too long to the next. An axis of 64 that is to be 32 halves with an argument that
is 64, or with 8 heads of 8 that become 4. A change that gives the axis its length is kept, and the next axis is looked
at; where nothing is left to try, the last change is taken back.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, atoms
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.cutting.keeping import Keep, check_keep
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.widths.argument_numbers import Location, Value, changed, numbers_in
from jaxpruner.structure.widths.old_numbers import OldNumbers
from jaxpruner.structure.widths.source_models import find_old_numbers

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# `(**arguments)` -> apply function, parameters.
Build = Callable[..., tuple[Callable[..., Any], tree_lib.PyTree]]
_Changes = dict[Location, Value]
# How often a module is built before the search gives up.
_MOST_BUILDS = 150


@dataclasses.dataclass(frozen=True, eq=False)
class ConstructorArguments:
    """Arguments of a module's constructor for the smaller model. Made by `constructor_arguments`.

    Attributes:
      arguments: all of them, changed.
      changes: what was changed: name -> the value before, the value after.
      different: a line for each axis that they do not give its length, or for where the program differs in more than
        numbers; empty if the module has the smaller model's program.
      old_numbers: the numbers of old widths that the smaller model keeps, and the module does not; `None` if shapes
        differ.
      gave_up: whether the search ended before everything was tried, so that other arguments might do.

    >>> print(ConstructorArguments({'width': 4}, {'width': (8, 4)}, ()))
    width: 8 -> 4
    """

    arguments: Mapping[str, Any]
    changes: Mapping[str, tuple[Value, Value]]
    different: tuple[str, ...]
    old_numbers: OldNumbers | None = None
    gave_up: bool = False

    @property
    def is_expressible(self) -> bool:
        """Whether a module of these arguments is the smaller model, but for numbers of old widths."""
        return not self.different

    def __str__(self) -> str:
        lines = []
        for name, (before, after) in self.changes.items():
            lines.append(f'{name}: {before} -> {after}')
        if self.different:
            if self.gave_up:
                lines.append(
                    f'no arguments were found in {_MOST_BUILDS} trials; with these it differs:'
                )
            else:
                lines.append('no arguments make the smaller model; with these it differs:')
            lines += [f'  {line}' for line in self.different]
        return '\n'.join(lines) or 'no argument changes'


def constructor_arguments(
    build: Build,
    arguments: Mapping[str, Any],
    graph: ChannelGraph,
    keep: Keep,
    allow_inexact: bool = False,
) -> ConstructorArguments:
    """Finds with which arguments a module becomes the smaller model.

    The module is built in shapes alone (`jax.eval_shape`), with numbers in its arguments changed one or two at a time,
    until each parameter has the shape that `ChannelGraph.shrink` gives it. Then its program is compared with the
    smaller model's.

    Args:
      build: `(**arguments) -> (apply function, parameters)`, as they were given to `channel_groups`.
      arguments: of the whole model. Whole numbers, and floats such as a ratio of widths, are changed; they may stand in
        mappings, sequences and dataclasses, such as a configuration.
      graph: of the model.
      keep: as in `ChannelGraph.shrink`.
      allow_inexact: as in `ChannelGraph.shrink`.

    Returns:
      The changed arguments. If no arguments make the smaller model, such as where one argument makes the widths of two
      layers that were cut to different ones, `different` names the axes that are wrong with the best ones.

    Raises:
      TypeError, KeyError, IndexError, ValueError: as in `ChannelGraph.shrink`; ValueError if the arguments do not build
        the parameters of the graph.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> def build(inputs, hidden):
    ...     params = {'up': jnp.zeros((inputs, hidden)), 'down': jnp.zeros((hidden, 2))}
    ...     return (lambda p, x: jnp.tanh(x @ p['up']) @ p['down']), params
    >>> graph = channel_groups(*build(8, 8), jnp.ones((5, 8)))
    >>> found = constructor_arguments(build, {'inputs': 8, 'hidden': 8}, graph, {'up[1]': [0, 3, 5]})
    >>> print(found)
    hidden: 8 -> 3
    >>> found.arguments
    {'inputs': 8, 'hidden': 3}
    """
    cut = check_keep(graph.groups, keep, allow_inexact)
    search = _Search(build, arguments, graph, cut)
    whole: dict[str, Shape] = {}
    for name, axes in search.axes.items():
        whole[name] = tuple([axis.size for axis in axes])
    for line in _differences(_shapes_of(build, arguments), whole):
        raise ValueError(
            f'build(**arguments) does not give the parameters of the graph: {line}; give the arguments of the model '
            'that channel_groups got'
        )
    search.run({})
    return search.result()


class _Mismatch(NamedTuple):
    """An axis that has not the length that it is to have."""

    leaf: str
    axis: int
    length: int
    target: int


class _Found(NamedTuple):
    """What a module with changed arguments still differs by."""

    changes: _Changes
    different: tuple[str, ...]
    old_numbers: OldNumbers | None


class _Search:
    """Goes through changes of arguments: mappings of locations to new values."""

    def __init__(self, build: Build, arguments: Mapping[str, Any], graph: ChannelGraph, cut: Cut):
        self.axes: dict[str, Axes] = {}
        for path, axes in zip(graph.trace.paths, graph.trace.leaves, strict=True):
            self.axes[tree_lib.path_string(path)] = axes
        self._build = build
        self._arguments = arguments
        self._graph = graph
        self._cut = cut
        self._target = {name: cut.shape(axes) for name, axes in self.axes.items()}
        self._numbers = dict(numbers_in(arguments))
        self._built: dict[frozenset[Any], Shapes | None] = {}
        self._gone_through: set[frozenset[Any]] = set()
        self._best: _Found | None = None
        self._gave_up = False

    def run(self, changes: _Changes) -> bool:
        """Whether some further changes make the smaller model."""
        key = frozenset(changes.items())
        shapes = self._shapes(changes)
        if key in self._gone_through or shapes is None:
            return False
        self._gone_through.add(key)
        found = self._look(changes, shapes)
        if self._best is None or len(found.different) < len(self._best.different):
            self._best = found
        if not found.different:
            return True
        # Axes that are to get the same length mostly come from the same number.
        lengths: dict[tuple[int, int], _Mismatch] = {}
        for mismatch in _mismatches(shapes, self._target):
            lengths.setdefault((mismatch.length, mismatch.target), mismatch)
        for mismatch in lengths.values():
            for further in self._candidates(mismatch, changes):
                longer = {**changes, **further}
                if self._repairs(longer, mismatch) and self.run(longer):
                    return True
        return False

    def result(self) -> ConstructorArguments:
        """The best that was seen."""
        assert self._best is not None
        changes, different, old_numbers = self._best
        named = {}
        for location, after in changes.items():
            named['.'.join(map(str, location))] = self._numbers[location], after
        arguments = changed(self._arguments, changes)
        gave_up = self._gave_up and bool(different)
        return ConstructorArguments(arguments, named, different, old_numbers, gave_up)

    def _look(self, changes: _Changes, shapes: Shapes) -> _Found:
        different = tuple(_differences(shapes, self._target))
        if different:
            return _Found(changes, different, None)
        arguments = changed(self._arguments, changes)
        try:
            old_numbers = self._compare(*_built_in_shapes(self._build, arguments))
        except (
            jax.errors.UnexpectedTracerError
        ):  # the function closes over values that building has made
            old_numbers = self._compare(*self._build(**arguments))
        except (
            Exception
        ) as error:  # the function's own, such as of attributes that do not fit together
            return _Found(changes, (f'its function raises {error!r}',), None)
        if old_numbers.other_difference:
            different = (f'the program has {old_numbers.other_difference}',)
        return _Found(changes, different, old_numbers)

    def _compare(self, apply_fn: Callable[..., Any], params: tree_lib.PyTree) -> OldNumbers:
        # Modules of some libraries have their widths in the structure of the tree.
        structure = jax.tree.structure(params)

        def small_fn(params: tree_lib.PyTree, *inputs: Any) -> Any:
            return apply_fn(jax.tree.unflatten(structure, jax.tree.leaves(params)), *inputs)

        return find_old_numbers(self._graph, self._cut, small_fn)

    def _shapes(self, changes: _Changes) -> Shapes | None:
        """The shapes of a module; `None` if its constructor refuses the arguments, or too many were built."""
        key = frozenset(changes.items())
        if key not in self._built:
            if len(self._built) >= _MOST_BUILDS:
                self._gave_up = True
                return None
            try:
                self._built[key] = _shapes_of(self._build, changed(self._arguments, changes))
            except Exception:  # the constructor's own, for widths that do not fit
                self._built[key] = None
        return self._built[key]

    def _repairs(self, changes: _Changes, mismatch: _Mismatch) -> bool:
        shapes = self._shapes(changes)
        if shapes is None or mismatch.leaf not in shapes:
            return False
        shape = shapes[mismatch.leaf]
        return len(shape) > mismatch.axis and shape[mismatch.axis] == mismatch.target

    def _candidates(self, mismatch: _Mismatch, changes: _Changes) -> Iterator[_Changes]:
        """Changes of one number that may give an axis its length, the likeliest first; then of two."""
        lengths = {mismatch.length: mismatch.target}
        for each in atoms(
            self.axes[mismatch.leaf][mismatch.axis]
        ):  # such as heads, features of a head
            lengths.setdefault(each.size, self._cut.size(each))
        same: list[tuple[Location, Value]] = []
        scaled: list[tuple[Location, Value]] = []
        for location, original in self._numbers.items():
            before = changes.get(location, original)
            if before in lengths:
                same.append((location, lengths[int(before)]))
            after = before * mismatch.target / mismatch.length
            if isinstance(before, float):
                scaled.append((location, after))
            elif after == int(after):
                scaled.append((location, int(after)))
        singles = list(dict.fromkeys([*same, *scaled]))
        for location, after in singles:
            yield {location: after}
        for (first, one), (second, other) in itertools.combinations(singles, 2):
            if first != second:
                yield {first: one, second: other}


def _built_in_shapes(
    build: Build, arguments: Mapping[str, Any]
) -> tuple[Callable[..., Any], tree_lib.PyTree]:
    """The apply function of a module, and the shapes of its parameters."""
    functions = []

    def params() -> tree_lib.PyTree:
        apply_fn, params = build(**arguments)
        functions.append(apply_fn)
        return params

    shapes = jax.eval_shape(params)
    return functions[-1], shapes


def _shapes_of(build: Build, arguments: Mapping[str, Any]) -> Shapes:
    _, tree = _built_in_shapes(build, arguments)
    paths, leaves, _ = tree_lib.flatten_with_paths(tree)
    shapes = {}
    for path, leaf in zip(paths, leaves, strict=True):
        shapes[tree_lib.path_string(path)] = tuple(leaf.shape)
    return shapes


def _mismatches(shapes: Shapes, target: Shapes) -> Iterator[_Mismatch]:
    for name, shape in shapes.items():
        expected = target.get(name, ())
        if len(shape) == len(expected):
            for axis, (length, wanted) in enumerate(zip(shape, expected, strict=True)):
                if length != wanted:
                    yield _Mismatch(name, axis, length, wanted)


def _differences(shapes: Shapes, target: Shapes) -> Iterator[str]:
    """A line for each difference of the shapes that a module has from those that it is to have."""
    for name, expected in target.items():
        if name not in shapes:
            yield f'{name} is missing'
        elif len(shapes[name]) != len(expected):
            yield f'{name} has shape {shapes[name]} in place of {expected}'
    for name in shapes:
        if name not in target:
            yield f'{name} is a further leaf'
    for mismatch in _mismatches(shapes, target):
        yield f'{mismatch.leaf}[{mismatch.axis}] has {mismatch.length} in place of {mismatch.target}'
