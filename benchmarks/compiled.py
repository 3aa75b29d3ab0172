"""What a compiled program says of itself: temporary memory, loops, and what devices tell one another."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

from jaxpruner.trace import compiled_once

_executable_of = compiled_once.executable_of
_COLLECTIVES = ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute', 'reduce-scatter')
# The type may be a tuple, with blanks in it; where a collective is in two parts its start is counted.
_COLLECTIVE = re.compile(rf' = (?P<type>.+?) (?:{"|".join(_COLLECTIVES)})(?:-start)?\(')
_ARRAY = re.compile(r'\b[a-z]+\d*\[([\d,]*)\]')
_BRANCH = re.compile(r' = .+? (?:while|conditional)\(')
_LOOP_BODY = re.compile(r' while\(.*\bbody=%?([\w.\-]+)')


class Collectives(NamedTuple):
    """What devices tell one another in a program."""

    largest: int  # elements of the largest array that one collective brings to a device
    in_a_turn: int  # number of collectives in each turn of the first loop that has any


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Memory that the compiled function needs besides its arguments and results, in bytes."""
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


class Watch:
    """The most memory that arrays, results and temporaries took at any call of the programs that were watched."""

    def __init__(self):
        self.bytes = 0

    def program(self, program: Any) -> Callable[..., Any]:
        """A compiled function that is watched.

        Args:
          program: what `jax.jit` returns.
        """

        def run(*arguments: Any, **settings: Any) -> Any:
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
                self._note(program.lower(*arguments, **settings).compile())
            return program(*arguments, **settings)

        run.lower, run.trace = program.lower, program.trace
        return run

    def executable_of(self, traced: Any, leaves: list[Any]) -> Callable[..., Any]:
        """As `compiled_once.executable_of`, watched."""
        executable = _executable_of(traced, leaves)

        def run(*arguments: Any) -> Any:
            self._note(executable)
            return executable(*arguments)

        return run

    def _note(self, executable: Any) -> None:
        memory = executable.memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        self.bytes = max(self.bytes, live_bytes() + new)


@contextlib.contextmanager
def watched(*places: tuple[Any, str]) -> Iterator[Watch]:
    """Watches what is compiled with `jax.jit` inside the context.

    Args:
      *places: modules and names in them of functions that were compiled before, to be watched, too.
    """
    watch, jit = Watch(), jax.jit
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(
                mock.patch.object(module, name, watch.program(getattr(module, name)))
            )
        stack.enter_context(mock.patch.object(compiled_once, 'executable_of', watch.executable_of))
        stack.enter_context(
            mock.patch.object(
                jax, 'jit', lambda *given, **named: watch.program(jit(*given, **named))
            )
        )
        yield watch


def live_bytes() -> int:
    """What all arrays take together."""
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def loops_and_branches(text: str) -> int:
    """How many loops and conditionals a program has, in whatever it calls, too."""
    return len(_BRANCH.findall(text))


def collectives(text: str) -> Collectives:
    """Reads the collectives off a compiled program's text."""
    largest = max(map(_largest_array, _COLLECTIVE.findall(text)), default=0)
    parts = dict(_computations(text))
    in_loops = [
        len(_COLLECTIVE.findall(parts[body])) for body in _LOOP_BODY.findall(parts['ENTRY'])
    ]
    return Collectives(largest, next(filter(None, in_loops), 0))


def _largest_array(result_type: str) -> int:
    shapes = _ARRAY.findall(result_type)
    return max(
        (math.prod(int(length) for length in shape.split(',') if length) for shape in shapes),
        default=0,
    )


def _computations(text: str) -> list[tuple[str, str]]:
    """Names and texts of a program's computations; the program itself is `ENTRY`."""
    parts = re.split(r'^(ENTRY|%?[\w.\-]+) .*\{$', text, flags=re.MULTILINE)
    return [(name.lstrip('%'), body) for name, body in zip(parts[1::2], parts[2::2], strict=True)]
