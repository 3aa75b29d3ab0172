"""Runs the program of a call in the way of its equation: compiled for itself, or computed again for derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

CHECKPOINTS = frozenset(('checkpoint', 'remat', 'remat2'))
JITS = frozenset(('jit', 'pjit'))
# Calls with a derivative rule of their own.
RULED_BACKWARDS = frozenset(('custom_vjp_call', 'custom_vjp_call_jaxpr'))
RULED = RULED_BACKWARDS | {'custom_jvp_call'}


def run_call(equation: Any, run: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """Runs a function in the place of a call's program: what was jitted or checkpointed stays so.

    Args:
      equation: the call.
      run: what the program computes; operands and results may be empty trees.
      operands: what it is called with.
    """
    name, params = equation.primitive.name, equation.params
    if name in CHECKPOINTS:
        run = jax.checkpoint(run, prevent_cse=params['prevent_cse'], policy=params['policy'])
    elif name in JITS:
        run.__name__ = params['name']
        operands = _with_shardings(operands, params['in_shardings'])
        run = jax.jit(run, inline=params['inline'])
        return _with_shardings(run(*operands), params['out_shardings'])
    return run(*operands)


def _with_shardings(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Values with the shardings that were asked for where they go into a program, or come out of it."""
    placed = []
    for value, sharding in zip(values, shardings, strict=True):
        is_array = bool(jax.tree.leaves(value))
        is_asked = isinstance(sharding, jax.sharding.Sharding) and is_array
        placed.append(lax.with_sharding_constraint(value, sharding) if is_asked else value)
    return placed
