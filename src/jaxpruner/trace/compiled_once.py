"""Compiles equal programs once, even if they are made of different functions, such as layers of like shape."""

import collections
import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

_MOST_KEPT = 128  # executables
# Programs with larger constants, such as frozen weights that a model closes over, are not kept.
_LARGEST_CONSTANTS = 1 << 16  # elements
_LONGEST_KEPT = 1 << 20  # characters of a program, which may have constants in inner functions

_executables: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()


class CompiledOnce:
    """A compiled function of pytrees that shares its executable with all functions of the same program.

    `jax.jit` compiles each function anew. Here the function is traced and lowered, which takes a tenth of the time. It
    is compiled only if no function with the same program was compiled before. Arrays that the function closes over are
    part of the program. Results may take the memory of the arguments `donate_argnums`.
    """

    def __init__(self, function: Callable[..., Any], donate_argnums: tuple[int, ...] = ()):
        self._function = function
        self._donated = donate_argnums
        # Signature of the arguments -> an executable, and the structure of its results.
        self._compiled: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        leaves, treedef = jax.tree.flatten(arguments)
        key = treedef, tuple(map(_signature, leaves))
        if key not in self._compiled:
            self._compiled[key] = self._compile(arguments)
        executable, structure = self._compiled[key]
        return jax.tree.unflatten(structure, executable(*leaves))

    def _compile(self, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Compiles the function of flat lists, and finds the structure of its results."""
        leaves, treedef = jax.tree.flatten(arguments)
        is_donated = [
            number in self._donated
            for number, argument in enumerate(arguments)
            for _ in jax.tree.leaves(argument)
        ]
        structures = []

        def flat(*leaves: Any) -> list[Any]:
            results = self._function(*jax.tree.unflatten(treedef, leaves))
            flat_results, structure = jax.tree.flatten(results)
            structures.append(structure)
            return flat_results

        donated = tuple(number for number, is_own in enumerate(is_donated) if is_own)
        # All arguments are kept: without an unused one, the next would take its place in an equal program.
        traced = jax.jit(flat, donate_argnums=donated, keep_unused=True).trace(*leaves)
        return executable_of(traced, leaves), structures[-1]


def _signature(leaf: Any) -> Hashable:
    is_weak = getattr(leaf, 'weak_type', not hasattr(leaf, 'dtype'))
    sharding = getattr(leaf, 'sharding', None)
    return jnp.shape(leaf), jnp.result_type(leaf), is_weak, sharding


def executable_of(traced: Any, leaves: list[Any]) -> Any:
    """Compiles what `jax.jit(function).trace` returned for these leaves, unless an equal program is kept."""
    lowered = traced.lower()
    if sum(map(jnp.size, traced.jaxpr.consts)) > _LARGEST_CONSTANTS:
        return lowered.compile()
    program = lowered.as_text()
    # The text of a program does not say which Python function it calls back.
    if 'callback' in program or len(program) > _LONGEST_KEPT:
        return lowered.compile()
    key = hashlib.sha256(program.encode()).digest(), tuple(map(_signature, leaves))
    if key not in _executables:
        _executables[key] = lowered.compile()
        if len(_executables) > _MOST_KEPT:
            _executables.popitem(last=False)
    _executables.move_to_end(key)
    return _executables[key]
