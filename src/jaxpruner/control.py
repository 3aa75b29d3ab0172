"""Control flow that costs nothing where it does nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib


def run_once(when: jax.Array | bool, function: Callable[..., Any], state: Any, *inputs: Any) -> Any:
    """`function(state, *inputs)` when it is due, else the state.

    A loop of at most one turn, where `cond` would do: its carry is updated in place, and `vmap` leaves it a loop,
    where it makes of `cond` a select that always pays for both branches.

    Args:
      when: bool scalar.
      function: called with the state and the inputs; returns a tree like the state, whose dtypes are kept.
      state: any pytree of arrays.
      *inputs: what else the function reads.

    Returns:
      A tree like the state.

    >>> run_once(jnp.bool_(True), lambda total, step: total + step, jnp.int32(1), 2)
    Array(3, dtype=int32)
    """

    def run(current: Any, *arguments: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), function(current, *arguments), current)

    def body(carry: Any) -> Any:
        pending, current = carry
        # Without this barrier what depends on the inputs alone (scores) would be moved out of the loop and always paid.
        _, current, barred = jax.lax.optimization_barrier((pending, current, inputs))
        return jnp.zeros_like(pending), run(current, *barred)

    if not tree_lib.is_traced(when):  # outside jit a loop would be compiled anew at each call
        return run(state, *inputs) if when else state
    return jax.lax.while_loop(lambda carry: carry[0], body, (when, state))[1]
