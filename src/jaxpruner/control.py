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

    What is known as the program is traced needs no loop: it is the function or nothing.

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
        return jax.tree.map(
            lambda new, old: jnp.asarray(new, jnp.result_type(old)), function(current, *arguments), current
        )

    def body(carry: Any) -> Any:
        pending, current = carry
        # Without this barrier what depends on the inputs alone (scores) would be moved out of the loop and always paid.
        _, current, barred = jax.lax.optimization_barrier((pending, current, inputs))
        return jnp.zeros_like(pending), run(current, *barred)

    def unchanged(current: Any, *_: Any) -> Any:
        return jax.tree.map(jnp.asarray, current)

    if not tree_lib.is_traced(when):  # also outside jit, where a loop would be compiled anew at each call
        return _in_branch(run, unchanged, state, *inputs) if when else state
    return jax.lax.while_loop(lambda carry: carry[0], body, (when, state))[1]


def apart(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, which XLA does not fuse with what surrounds it.

    What the function reads is then computed once, where fused code would compute it anew for each result.

    Args:
      function: of pytrees of arrays.
      *inputs: what it reads.

    Returns:
      Its result.

    >>> int(apart(jnp.add, 1, 2))
    3
    """

    def zeros(*_: Any) -> Any:
        return jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), jax.eval_shape(function, *inputs))

    return _in_branch(function, zeros, *inputs)


def _in_branch(function: Callable[..., Any], unreachable: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)` in a branch that is always taken; compiled, it rounds as it does in a loop."""
    if not any(map(tree_lib.is_traced, jax.tree.leaves(inputs))):
        return function(*inputs)
    # XLA fuses nothing across the border of a branch; barriers alone vanish before it does.
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    return jax.lax.cond(always, function, unreachable, *inputs)
