"""Finds the constructor arguments that make a module of smaller widths.

A module does not say how its arguments become widths. So it is built with changed arguments, without values, until
every leaf has the shape that it has in the smaller model. Shapes do not tell 2 heads of 4 features from 1 head of 8, so
the program is compared with that of the smaller model, too.

The search goes from one axis that is too long to the next. Suppose an axis of 64 should become 32. That may come from
an argument of 64 that is halved, or from 8 heads of 8 that become 4 heads. A change that gives the axis its length is
kept, and the search goes on with the next axis. If nothing is left to try, the last change is taken back.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, atoms, sizes_of
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.widths.argument_numbers import Location, Value, changed, numbers_in
from jaxpruner.structure.widths.built_shapes import (
    Build,
    Mismatch,
    ModuleInShapes,
    Shape,
    Shapes,
    build_in_shapes,
    differences,
    mismatches,
    shapes_of,
)
from jaxpruner.structure.widths.old_numbers import OldNumbers
from jaxpruner.structure.widths.source_models import find_old_numbers
from jaxpruner.tree import PyTree

_Change = tuple[Location, Value]
_Changes = dict[Location, Value]
_MOST_BUILDS = 150  # of a module, before the search gives up


@dataclasses.dataclass(frozen=True, eq=False)
class ConstructorArguments:
    """Arguments of a module's constructor for the smaller model. Made by `constructor_arguments`.

    Attributes:
      arguments: all arguments, with the changes.
      changes: name -> the value before, the value after.
      different: a line for each axis whose length is wrong, or for the place where the program differs in more than
        numbers; empty if the module has the smaller model's program.
      old_numbers: the numbers of old widths that the smaller model keeps and the module does not; `None` if shapes
        differ.
      gave_up: whether the search ended before everything was tried. Then other arguments might work.

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
        """Whether a module of these arguments is the smaller model, except for numbers of old widths."""
        return not self.different

    def __str__(self) -> str:
        lines = []
        for name, (before, after) in self.changes.items():
            lines.append(f'{name}: {before} -> {after}')
        if self.different:
            failure = 'no arguments make the smaller model'
            if self.gave_up:
                failure = f'no arguments were found in {_MOST_BUILDS} trials'
            lines.append(f'{failure}; with these it differs:')
            lines += [f'  {line}' for line in self.different]
        return '\n'.join(lines) or 'no argument changes'


def constructor_arguments(
    build: Build,
    arguments: Mapping[str, Any],
    graph: ChannelGraph,
    keep: KeepByGroup,
    allow_inexact: bool = False,
) -> ConstructorArguments:
    """Finds the arguments with which a module becomes the smaller model.

    The module is built without values (`jax.eval_shape`). One or two numbers in its arguments are changed at a time,
    until each parameter has the shape that `ChannelGraph.shrink` gives it. Then the module's program is compared with
    that of the smaller model.

    Args:
      build: `(**arguments) -> (apply function, parameters)`, as they were given to `channel_groups`.
      arguments: of the whole model. Whole numbers are changed, and floats such as a ratio of widths. They may be inside
        mappings, sequences and dataclasses, such as a configuration.
      graph: of the model.
      keep: as in `ChannelGraph.shrink`.
      allow_inexact: as in `ChannelGraph.shrink`.

    Returns:
      The changed arguments. Sometimes no arguments make the smaller model, for example if one argument makes the widths
      of two layers and these were cut differently. Then `different` names the axes that are wrong with the best
      arguments.

    Raises:
      TypeError, KeyError, IndexError, ValueError: as in `ChannelGraph.shrink`; ValueError if the arguments do not build
        the parameters of the graph.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> def build(inputs, hidden):
    ...     params = {'up': jnp.zeros((inputs, hidden)), 'down': jnp.zeros((hidden, 2))}
    ...     return (lambda p, x: jnp.tanh(x @ p['up']) @ p['down']), params
    >>> graph = channel_groups(*build(8, 8), jnp.ones((5, 8)))
    >>> changed = constructor_arguments(build, {'inputs': 8, 'hidden': 8}, graph, {'up[1]': [0, 3, 5]})
    >>> print(changed)
    hidden: 8 -> 3
    >>> changed.arguments
    {'inputs': 8, 'hidden': 3}
    """
    cut = check_keep(graph.groups, keep, allow_inexact)
    search = _Search(build, arguments, graph, cut)
    whole: dict[str, Shape] = {}
    for name, axes in search.axes.items():
        whole[name] = sizes_of(axes)
    different = list(differences(shapes_of(build, arguments), whole))
    if different:
        raise ValueError(
            f'build(**arguments) does not give the parameters of the graph: {different[0]}; give the arguments of the '
            'model that channel_groups got'
        )
    search.run({})
    return search.result()


class _Trial(NamedTuple):
    """Changes of arguments, and the differences that a module built with them still has."""

    changes: _Changes
    different: tuple[str, ...]
    old_numbers: OldNumbers | None


def _count_differences(trial: _Trial) -> int:
    return len(trial.different)


class _Search:
    """Goes through changes of arguments: mappings of locations to new values."""

    def __init__(self, build: Build, arguments: Mapping[str, Any], graph: ChannelGraph, cut: Cut):
        self.axes: dict[str, Axes] = {}
        for path, axes in graph.trace.named_leaves:
            self.axes[tree_lib.path_string(path)] = axes
        self._build = build
        self._arguments = arguments
        self._graph = graph
        self._cut = cut
        self._target: dict[str, Shape] = {}
        for name, axes in self.axes.items():
            self._target[name] = cut.shape(axes)
        self._numbers = dict(numbers_in(arguments))
        self._built: dict[frozenset[Any], Shapes | None] = {}
        self._gone_through: set[frozenset[Any]] = set()
        self._best: _Trial | None = None
        self._gave_up = False

    def run(self, changes: _Changes) -> bool:
        """Tries these changes, and further ones on top; returns whether some make the smaller model."""
        key = frozenset(changes.items())
        shapes = self._shapes(changes)
        if key in self._gone_through or shapes is None:
            return False
        self._gone_through.add(key)
        trial = self._try(changes, shapes)
        self._best = min(self._best or trial, trial, key=_count_differences)
        if not trial.different:
            return True
        # Axes that change from and to the same lengths mostly come from the same number.
        by_lengths: dict[tuple[int, int], Mismatch] = {}
        for mismatch in mismatches(shapes, self._target):
            lengths = mismatch.length, mismatch.target
            by_lengths.setdefault(lengths, mismatch)
        for mismatch in by_lengths.values():
            for further in self._candidates(mismatch, changes):
                more_changes = {**changes, **further}
                if self._repairs(more_changes, mismatch) and self.run(more_changes):
                    return True
        return False

    def result(self) -> ConstructorArguments:
        """The result for the changes with the fewest differences."""
        assert self._best is not None
        changes, different, old_numbers = self._best
        named = {}
        for location, after in changes.items():
            name = '.'.join(map(str, location))
            named[name] = self._numbers[location], after
        arguments = changed(self._arguments, changes)
        gave_up = self._gave_up and bool(different)
        return ConstructorArguments(arguments, named, different, old_numbers, gave_up)

    def _try(self, changes: _Changes, shapes: Shapes) -> _Trial:
        """Compares the shapes, and then the programs."""
        different = tuple(differences(shapes, self._target))
        if different:
            return _Trial(changes, different, None)
        arguments = changed(self._arguments, changes)
        try:
            module = build_in_shapes(self._build, arguments)
            old_numbers = self._compare(module)
        except jax.errors.UnexpectedTracerError:
            # The function closes over values that building the module made.
            apply_fn, params = self._build(**arguments)
            old_numbers = self._compare(ModuleInShapes(apply_fn, params))
        except Exception as error:
            # The function raises it, for example because attributes do not fit together.
            return _Trial(changes, (f'its function raises {error!r}',), None)
        if old_numbers.other_difference:
            different = (f'the program has {old_numbers.other_difference}',)
        return _Trial(changes, different, old_numbers)

    def _compare(self, module: ModuleInShapes) -> OldNumbers:
        # Some libraries have widths in the structure of the tree.
        structure = jax.tree.structure(module.params)

        def small_fn(params: PyTree, *inputs: Any) -> Any:
            leaves = jax.tree.leaves(params)
            restored = jax.tree.unflatten(structure, leaves)
            return module.apply_fn(restored, *inputs)

        return find_old_numbers(self._graph, self._cut, small_fn)

    def _shapes(self, changes: _Changes) -> Shapes | None:
        """The shapes of a module; `None` if its constructor raises an error, or too many modules were built."""
        key = frozenset(changes.items())
        if key not in self._built:
            if len(self._built) >= _MOST_BUILDS:
                self._gave_up = True
                return None
            arguments = changed(self._arguments, changes)
            try:
                self._built[key] = shapes_of(self._build, arguments)
            except Exception:  # raised by the constructor, for widths that do not fit
                self._built[key] = None
        return self._built[key]

    def _repairs(self, changes: _Changes, mismatch: Mismatch) -> bool:
        shapes = self._shapes(changes)
        if shapes is None or mismatch.leaf not in shapes:
            return False
        shape = shapes[mismatch.leaf]
        has_axis = mismatch.axis < len(shape)
        return has_axis and shape[mismatch.axis] == mismatch.target

    def _candidates(self, mismatch: Mismatch, changes: _Changes) -> Iterator[_Changes]:
        """Yields changes of one number that may give an axis its length, the likeliest first; then of two."""
        same = self._same_as_width(mismatch, changes)
        scaled = self._scaled(mismatch, changes)
        singles = list(dict.fromkeys([*same, *scaled]))
        for location, value in singles:
            yield {location: value}
        for first, second in itertools.combinations(singles, 2):
            pair = dict([first, second])
            if len(pair) == 2:
                yield pair

    def _same_as_width(self, mismatch: Mismatch, changes: _Changes) -> Iterator[_Change]:
        """Yields new values of numbers equal to the length of an axis, or of a part such as the features of a head."""
        axis = self.axes[mismatch.leaf][mismatch.axis]
        new_lengths = {mismatch.length: mismatch.target}
        for atom in atoms(axis):
            new_lengths.setdefault(atom.size, self._cut.size(atom))
        for location, original in self._numbers.items():
            before = changes.get(location, original)
            if before in new_lengths:
                yield location, new_lengths[int(before)]

    def _scaled(self, mismatch: Mismatch, changes: _Changes) -> Iterator[_Change]:
        """Yields new values of numbers, scaled as the axis is. Whole numbers stay whole."""
        for location, original in self._numbers.items():
            before = changes.get(location, original)
            after = before * mismatch.target / mismatch.length
            if isinstance(before, float):
                yield location, after
            elif after == int(after):
                yield location, int(after)
