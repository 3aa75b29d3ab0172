"""Compiles equal programs once, even if they are made of different functions, such as layers of like shape."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

_MOST_KEPT = 128  # executables
# Programs with larger constants, such as frozen weights that a model closes over, are not kept.
_LARGEST_CONSTANTS = 1 << 16  # elements
_LONGEST_KEPT = 1 << 20  # characters of a program, which may have constants in inner functions

_executables: dict[Hashable, Any] = {}


class CompiledOnce:
    """A compiled function of pytrees that shares its executable with all functions of the same program.

    `jax.jit` compiles each function anew. Here the function is traced and lowered, which takes a tenth of the time. It
    is compiled only if no function with the same program was compiled before. Arrays that the function closes over are
    part of the program. Results may take the memory of the arguments `donate_argnums`.
    """

    def __init__(self, function: Callable[..., Any], donate_argnums: tuple[int, ...] = ()):
        # All arguments are kept: without an unused one, the next would take its place in an equal program.
        self._jitted = jax.jit(function, donate_argnums=donate_argnums, keep_unused=True)
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        leaves, treedef = jax.tree.flatten(arguments)
        signature = treedef, tuple(map(_signature, leaves))
        if signature not in self._compiled:
            traced = self._jitted.trace(*arguments)
            self._compiled[signature] = executable_of(traced, signature)
        return self._compiled[signature](*arguments)


def _signature(leaf: Any) -> Hashable:
    is_weak = getattr(leaf, 'weak_type', not hasattr(leaf, 'dtype'))
    sharding = getattr(leaf, 'sharding', None)
    return jnp.shape(leaf), jnp.result_type(leaf), is_weak, sharding


def executable_of(traced: Any, signature: Hashable) -> Any:
    """Compiles what `jax.jit(function).trace` returned for such arguments, unless an equal program is kept."""
    lowered = traced.lower()
    if sum(map(jnp.size, traced.jaxpr.consts)) > _LARGEST_CONSTANTS:
        return lowered.compile()
    program = lowered.as_text()
    # The text of a program does not say which Python function it calls back.
    if 'callback' in program or len(program) > _LONGEST_KEPT:
        return lowered.compile()
    digest = hashlib.sha256(program.encode()).digest()
    key = digest, signature, jax.tree.structure(traced.out_info)
    if key not in _executables:
        _executables[key] = lowered.compile()
        if len(_executables) > _MOST_KEPT:
            _executables.pop(next(iter(_executables)))
    return _executables[key]
