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
    only if no function with the same program was compiled before. Arrays that the function merely closes over become
    part of the program. Results may take the memory of the arguments `donate_argnums`.
    """

    def __init__(self, function: Callable[..., Any], donate_argnums: tuple[int, ...] = ()):
        self._function = function
        self._donated = donate_argnums
        # Executables, and the structures of their results.
        self._compiled: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        leaves, treedef = jax.tree.flatten(arguments)
        key = treedef, tuple(map(_signature, leaves))
        if key not in self._compiled:
            traced, structure = self._trace(arguments)
            self._compiled[key] = executable_of(traced, leaves), structure
        executable, structure = self._compiled[key]
        return jax.tree.unflatten(structure, executable(*leaves))

    def lower(self, *arguments: Any) -> Any:
        """The lowered program of arguments, or of their shapes."""
        traced, _ = self._trace(arguments)
        return traced.lower()

    def _trace(self, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """The traced function of flat lists, and the structure of its results."""
        leaves, treedef = jax.tree.flatten(arguments)
        structures = []

        def flat(*leaves: Any) -> list[Any]:
            results = self._function(*jax.tree.unflatten(treedef, leaves))
            flat_results, structure = jax.tree.flatten(results)
            structures.append(structure)
            return flat_results

        donated: list[int] = []
        start = 0
        for number, argument in enumerate(arguments):
            end = start + len(jax.tree.leaves(argument))
            if number in self._donated:
                donated += range(start, end)
            start = end
        # An argument that is left out would not show in the program, and the next would take its place.
        compiled = jax.jit(flat, donate_argnums=tuple(donated), keep_unused=True)
        traced = compiled.trace(*leaves)
        return traced, structures[-1]


def _signature(leaf: Any) -> Hashable:
    is_weak = getattr(leaf, 'weak_type', not hasattr(leaf, 'dtype'))
    sharding = getattr(leaf, 'sharding', None)
    return jnp.shape(leaf), jnp.result_type(leaf), is_weak, sharding


def executable_of(traced: Any, leaves: list[Any]) -> Any:
    """The compiled program of what `jax.jit(function).trace` returned for these leaves, made before or made now."""
    lowered = traced.lower()
    if sum(map(jnp.size, traced.jaxpr.consts)) > _LARGEST_CONSTANTS:
        return lowered.compile()
    program = lowered.as_text()
    # Which Python function is called back does not show in a program.
    calls_python = 'callback' in program
    if calls_python or len(program) > _LONGEST_KEPT:
        return lowered.compile()
    digest = hashlib.sha256(program.encode()).digest()
    key = digest, tuple(map(_signature, leaves))
    if key not in _executables:
        _executables[key] = lowered.compile()
        if len(_executables) > _MOST_KEPT:
            _executables.popitem(last=False)
    _executables.move_to_end(key)
    return _executables[key]
