"""Runs another program in the place of a call, jitted or checkpointed as the call was."""

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
    """Runs a function in the place of a call's program, jitted or checkpointed as the call was.

    Args:
      equation: the call.
      run: computes what the program does. Operands and results may be empty trees.
      operands: of the call.
    """
    name = equation.primitive.name
    params = equation.params
    if name in CHECKPOINTS:
        run = jax.checkpoint(run, prevent_cse=params['prevent_cse'], policy=params['policy'])
    if name not in JITS:
        return run(*operands)
    run.__name__ = params['name']
    run = jax.jit(run, inline=params['inline'])
    operands = _with_shardings(operands, params['in_shardings'])
    results = run(*operands)
    return _with_shardings(results, params['out_shardings'])


def _with_shardings(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Constrains values to the shardings that a call asks for. Empty trees stay."""
    placed = []
    for value, sharding in zip(values, shardings, strict=True):
        is_array = bool(jax.tree.leaves(value))
        if is_array and isinstance(sharding, jax.sharding.Sharding):
            value = lax.with_sharding_constraint(value, sharding)
        placed.append(value)
    return placed
