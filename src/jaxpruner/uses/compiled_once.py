"""Compiles a program once, whichever function it was made of: layers of like shape run the same program."""

import collections
import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

_MOST_KEPT = 128  # executables
# Programs with larger constants, such as frozen weights that a model closes over, end with the function that has them.
_LARGEST_CONSTANTS = 1 << 16  # elements
_LONGEST_KEPT = 1 << 20  # characters, for constants inside inner functions

_executables: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()


class CompiledOnce:
    """A compiled function of pytrees that shares its executable with all functions of the same program.

    `jax.jit` compiles each function anew. Here it is traced and lowered, which takes a tenth of the time, and compiled
    only if no function with the same program was compiled before.

    Args:
      function: of pytrees of arrays; arrays that it merely closes over become part of the program.
      donate_argnums: arguments whose memory results may take.

    >>> @CompiledOnce
    ... def double(tree):
    ...     return {'doubled': 2 * tree['x']}
    >>> double({'x': jnp.ones(2)})['doubled'].tolist()
    [2.0, 2.0]
    """

    def __init__(self, function: Callable[..., Any], donate_argnums: tuple[int, ...] = ()):
        self._function, self._donated = function, donate_argnums
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        leaves, treedef = jax.tree.flatten(arguments)
        key = treedef, tuple(map(_signature, leaves))
        if key not in self._known:
            traced, outputs = self._trace(arguments)
            self._known[key] = executable_of(traced, leaves), outputs()
        executable, outputs = self._known[key]
        return jax.tree.unflatten(outputs, executable(*leaves))

    def lower(self, *arguments: Any) -> Any:
        """The lowered program of arguments, or of their shapes.

        Args:
          *arguments: of the function.
        """
        return self._trace(arguments)[0].lower()

    def _trace(self, arguments: tuple[Any, ...]) -> tuple[Any, Callable[[], Any]]:
        """The traced function of flat lists, and what says the structure of its results."""
        leaves, treedef = jax.tree.flatten(arguments)
        outputs = []

        def flat(*leaves: Any) -> list[Any]:
            results, structure = jax.tree.flatten(
                self._function(*jax.tree.unflatten(treedef, leaves))
            )
            outputs[:] = [structure]
            return results

        donated, start = [], 0
        for number, argument in enumerate(arguments):
            end = start + len(jax.tree.leaves(argument))
            donated += range(start, end) if number in self._donated else ()
            start = end
        # An argument that is left out would not show in the program, and the next would take its place.
        return jax.jit(flat, donate_argnums=tuple(donated), keep_unused=True).trace(
            *leaves
        ), lambda: outputs[0]


def _signature(leaf: Any) -> Hashable:
    weak = getattr(leaf, 'weak_type', not hasattr(leaf, 'dtype'))
    return jnp.shape(leaf), jnp.result_type(leaf), weak, getattr(leaf, 'sharding', None)


def executable_of(traced: Any, leaves: list[Any]) -> Any:
    """The compiled program of a traced function, made before or made now.

    Args:
      traced: what `jax.jit(function).trace` returns.
      leaves: its arguments.

    >>> executable_of(jax.jit(lambda x: 2 * x).trace(jnp.ones(2)), [jnp.ones(2)])(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    lowered = traced.lower()
    if sum(jnp.size(constant) for constant in traced.jaxpr.consts) > _LARGEST_CONSTANTS:
        return lowered.compile()
    program = lowered.as_text()
    # Which Python function is called back does not show in a program.
    calls_python = 'callback' in program
    if calls_python or len(program) > _LONGEST_KEPT:
        return lowered.compile()
    key = hashlib.sha256(program.encode()).digest(), tuple(map(_signature, leaves))
    if key not in _executables:
        _executables[key] = lowered.compile()
        if len(_executables) > _MOST_KEPT:
            _executables.popitem(last=False)
    _executables.move_to_end(key)
    return _executables[key]
