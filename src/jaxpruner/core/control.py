"""Control flow that costs nothing where it does nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib


def run_once(
    when: jax.Array | bool,
    function: Callable[..., Any],
    state: Any,
    *inputs: Any,
    narrow: bool = False,
) -> Any:
    """`function(state, *inputs)` when it is due, else the state.

    A loop of at most one turn, where `cond` would do: its carry is updated in place, and `vmap` leaves it a loop,
    where it makes of `cond` a select that always pays for both branches.

    What is known as the program is traced needs no loop: it is the function or nothing.

    Args:
      when: bool scalar.
      function: called with the state and the inputs; returns a tree like the state, whose dtypes are kept.
      state: any pytree of arrays.
      *inputs: what else the function reads.
      narrow: the loop has nothing to do with those arrays of the state that the function leaves as they are, nor with
        inputs that it never reads: what follows may begin before the loop ends, and the loop before they are computed.

    Returns:
      A tree like the state.

    >>> run_once(jnp.bool_(True), lambda total, step: total + step, jnp.int32(1), 2)
    Array(3, dtype=int32)
    """

    def run(current: Any, *arguments: Any) -> Any:
        return jax.tree.map(
            lambda new, old: jnp.asarray(new, jnp.result_type(old)),
            function(current, *arguments),
            current,
        )

    def body(carry: Any) -> Any:
        pending, current = carry
        # Without this barrier what depends on the inputs alone (scores) would be moved out of the loop and always paid.
        _, current, barred = jax.lax.optimization_barrier((pending, current, inputs))
        return jnp.zeros_like(pending), run(current, *barred)

    def unchanged(current: Any, *_: Any) -> Any:
        return jax.tree.map(jnp.asarray, current)

    if not tree_lib.is_traced(
        when
    ):  # also outside jit, where a loop would be compiled anew at each call
        return _in_branch(run, unchanged, state, *inputs) if when else state
    if narrow:
        return _run_once_narrowly(when, run, state, *inputs)
    return jax.lax.while_loop(lambda carry: carry[0], body, (when, state))[1]


def _run_once_narrowly(
    when: jax.Array | bool, function: Callable[..., Any], state: Any, *inputs: Any
) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    values = [*leaves, *jax.tree.leaves(inputs)]
    program = jax.make_jaxpr(function)(state, *inputs)
    changed, read = _changed_and_read(program.jaxpr, len(leaves))
    compute = jax.extend.core.jaxpr_as_fun(program)

    def change(current: list, known: list) -> list:
        given = {**dict(zip(changed, current, strict=True)), **dict(zip(read, known, strict=True))}
        results = compute(*[given.get(i, value) for i, value in enumerate(values)])
        return [results[i] for i in changed]

    new = run_once(when, change, [leaves[i] for i in changed], [values[i] for i in read])
    found = dict(zip(changed, new, strict=True))
    return jax.tree.unflatten(treedef, [found.get(i, leaf) for i, leaf in enumerate(leaves)])


def _changed_and_read(program: jax.extend.core.Jaxpr, number: int) -> tuple[list[int], list[int]]:
    """Which of the first `number` arguments come out changed, and which of the others are read at all."""
    changed = [i for i in range(number) if program.outvars[i] is not program.invars[i]]
    variables = [variable for equation in program.eqns for variable in equation.invars]
    variables += [program.outvars[i] for i in changed]
    seen = {variable for variable in variables if not isinstance(variable, jax.extend.core.Literal)}
    return changed, [
        i for i, variable in enumerate(program.invars) if variable in seen and i not in changed
    ]


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
        return jax.tree.map(
            lambda result: jnp.zeros(result.shape, result.dtype), jax.eval_shape(function, *inputs)
        )

    return _in_branch(function, zeros, *inputs)


def _in_branch(function: Callable[..., Any], unreachable: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)` in a branch that is always taken; compiled, it rounds as it does in a loop."""
    if not any(map(tree_lib.is_traced, jax.tree.leaves(inputs))):
        return function(*inputs)
    # XLA fuses nothing across the border of a branch; barriers alone vanish before it does.
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    return jax.lax.cond(always, function, unreachable, *inputs)
