"""Control flow that costs nothing where it does nothing, and what keeps the compiler from undoing it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib


def run_once(
    condition: jax.Array | bool, function: Callable[..., Any], state: Any, *inputs: Any
) -> Any:
    """Returns `function(state, *inputs)` if the condition holds, else the state.

    A `while_loop` that runs zero or one times, where `cond` would do: its carry is updated in place, and under `vmap`
    it stays a loop, where `cond` becomes a select that always pays for both branches. If the condition is known while
    the program is traced, there is no loop: the function is in the program, or not.

    Args:
      condition: bool scalar.
      function: called with the state and the inputs; returns a tree like the state, whose dtypes are kept.
      state: any pytree of arrays.
      *inputs: what else the function reads.

    Returns:
      A tree like the state.
    """

    def run(current, *arguments):
        return jax.tree.map(
            lambda new, old: jnp.asarray(new, jnp.result_type(old)),
            function(current, *arguments),
            current,
        )

    def body(carry):
        # Without the barrier XLA moves what does not change in the loop, such as scores, out of it: into every step.
        pending, current, arguments = jax.lax.optimization_barrier((*carry, inputs))
        return jnp.zeros_like(pending), run(current, *arguments)

    if not tree_lib.is_traced(condition):
        return run(state, *inputs) if condition else state
    return jax.lax.while_loop(lambda carry: carry[0], body, (condition, state))[1]


def draw_in_loop(function: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Draws random numbers, `function(key)`, inside the loop of a mask update.

    The counters of the generator depend on the shape alone. Without a branch, XLA computes them outside the loop, in
    every step; a barrier does not help, since they are computed from no value that the loop reads.
    """
    shape = jax.eval_shape(function, key)
    # A condition that XLA can see through would take the branch away.
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    return jax.lax.cond(always, function, lambda _: jnp.zeros(shape.shape, shape.dtype), key)
