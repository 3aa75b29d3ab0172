"""A traced model as one list of steps, calls taken apart."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jaxpruner.uses import bodies
from jaxpruner.uses.graph import Use, UseGraph

Path = tuple[int, ...]


class Step(NamedTuple):
    """An equation, and the numbers of the values that it reads and writes.

    >>> Step(None, (0,), (1, 2), (3,)).writes
    (3,)
    """

    equation: Any
    path: Path
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Steps:
    """The steps of a model up to the last operation that is observed, and which values they pass on.

    Attributes:
      steps: in the order of the program; each value has a number of its own.
      inputs: numbers of the parameters and of the inputs.
      constants: the constants' values by number.

    Args:
      graph: of the model.
      uses: what is going to be observed.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> params, x = {'a': jnp.ones((3, 3)), 'b': jnp.ones((3, 1))}, jnp.ones((2, 3))
    >>> graph = param_uses(lambda params, x: jnp.tanh(x @ params['a']) @ params['b'] + 1, params, x)
    >>> found = Steps(graph, graph['b'])
    >>> [step.equation.primitive.name for step in found.steps], found.live(1)
    (['dot_general', 'tanh', 'dot_general'], [3])
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        paths = [use.site.path for use in uses]
        self._numbers = itertools.count()
        self.steps: list[Step] = []
        self.constants: dict[int, Any] = {}
        jaxpr = graph.program.jaxpr
        self._bytes: dict[int, int] = {}
        self.inputs = [next(self._numbers) for _ in jaxpr.invars]
        self._data = set(self.inputs[len(graph) + len(graph.opaque) + len(graph.unused) :])
        self._bytes.update(zip(self.inputs, map(_bytes_of, jaxpr.invars), strict=True))
        self._append(bodies.Program(jaxpr, tuple(graph.program.consts)), self.inputs, ())
        self._places = {step.path: place for place, step in enumerate(self.steps)}
        del self.steps[max(map(self.place_of, paths), default=-1) + 1 :]

    def place_of(self, path: Path) -> int:
        """The place in the list of the step in which an equation lies.

        Args:
          path: the equation's.
        """
        known = (path[:length] for length in range(len(path), 0, -1))
        return next(self._places[start] for start in known if start in self._places)

    def scan_of(self, uses: Iterable[Use]) -> int | None:
        """The place of the scan of which each trip takes its own element of what all of some uses read.

        Args:
          uses: of a leaf.

        Returns:
          `None` if there is no such scan, or it lies in another loop.
        """
        loops = {use.site.view.stack[0].loop if use.site.view.stack else () for use in uses}
        return self._places.get(loops.pop()) if len(loops) == 1 else None

    def live(self, place: int) -> list[int]:
        """Values that depend on the inputs, are there before a step, and are read from there on.

        Args:
          place: of the step.
        """
        later = self.steps[place:]
        reads = {number for step in later for number in step.reads}
        return sorted(reads & self._data - {number for step in later for number in step.writes})

    def bytes_kept(self) -> list[int]:
        """For each place, the end included, how many bytes the values take that `live` names there."""
        first = dict.fromkeys(self.inputs, 0)
        last: dict[int, int] = {}
        for place, step in enumerate(self.steps):
            first |= dict.fromkeys(step.writes, place + 1)
            last |= dict.fromkeys(step.reads, place)
        changes = [0] * (len(self.steps) + 2)
        for number in self._data & last.keys():
            changes[first[number]] += self._bytes[number]
            changes[last[number] + 1] -= self._bytes[number]
        return list(itertools.accumulate(changes))[:-1]

    def of_data(self, numbers: Iterable[int]) -> list[int]:
        """Those of some values that depend on the inputs.

        Args:
          numbers: of the values.
        """
        return sorted(self._data.intersection(numbers))

    def made_anew(self, numbers: Iterable[int], place: int) -> list[Step]:
        """The steps before a place that make some values of parameters and constants alone, in their order.

        Args:
          numbers: of the values.
          place: of a step.
        """
        wanted, found = set(numbers), []
        for step in reversed(self.steps[:place]):
            if wanted.difference(self._data).intersection(step.writes):
                found.append(step)
                wanted.update(step.reads)
        return found[::-1]

    def _append(self, program: bodies.Program, inputs: Sequence[int], path: Path) -> list[int]:
        """Adds the steps of a program; returns the numbers of its results."""
        jaxpr = program.jaxpr
        numbers = dict(zip(map(id, jaxpr.invars), inputs, strict=True))

        def constant(value: Any) -> int:
            number = next(self._numbers)
            self.constants[number] = value
            return number

        def number_of(variable: Any) -> int:
            return (
                constant(variable.val) if isinstance(variable, Literal) else numbers[id(variable)]
            )

        for variable, value in zip(jaxpr.constvars, program.constants, strict=True):
            numbers[id(variable)] = constant(value)
        for place, equation in enumerate(jaxpr.eqns):
            here, reads = (*path, place), tuple(map(number_of, equation.invars))
            # All calls are taken apart: one that returns a parameter beside data does not make it data.
            if equation.primitive.name in bodies.CALLS - {'shard_map'}:
                writes = self._append(bodies.called(equation), reads, (*here, 0))
            else:
                writes = [next(self._numbers) for _ in equation.outvars]
                self._bytes.update(zip(writes, map(_bytes_of, equation.outvars), strict=True))
                self.steps.append(Step(equation, here, reads, tuple(writes)))
                if self._data.intersection(reads):
                    self._data.update(writes)
            numbers.update(zip(map(id, equation.outvars), writes, strict=True))
        return [number_of(variable) for variable in jaxpr.outvars]


def _bytes_of(variable: Any) -> int:
    aval = variable.aval
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, 'shape') else 0
