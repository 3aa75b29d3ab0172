"""Control flow that costs nothing where it does nothing, and what keeps the compiler from undoing it.

    function                 what XLA or JAX does without it
    run_once                 pays for a mask update in every step, under `vmap`
    keep_in_loop             moves what the body of a loop computes out of the loop
    draw_in_loop             moves the counters of random numbers out of the loop
    keep_whole               takes a concatenated array apart again, part by part
    compute_apart            fuses a computation with its readers, which computes it anew and rounds otherwise
    hide_constants           compiles programs that differ by a constant separately
    jit_when_eager           compiles and starts each operation of an eager function alone
    sum_squares_in_passing   writes values to memory before it sums them

Each docstring says what happens without the function, and where that was seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxpruner import tree as tree_lib


def run_once(
    condition: jax.Array | bool,
    function: Callable[..., Any],
    state: Any,
    *inputs: Any,
    narrow: bool = False,
) -> Any:
    """Returns `function(state, *inputs)` if the condition holds, else the state.

    A `while_loop` that runs zero or one times, where `cond` would do. Its carry is updated in place, and under `vmap`
    it stays a loop; `cond` becomes a select there, which always pays for both branches. If the condition is known while
    the program is traced, there is no loop: the function is in the program, or not.

    Args:
      condition: bool scalar.
      function: called with the state and the inputs; returns a tree like the state, whose dtypes are kept.
      state: any pytree of arrays.
      *inputs: what else the function reads.
      narrow: the loop carries only those arrays of the state that the function changes, and reads only the inputs that
        it uses. What follows may begin before the loop ends, and the loop may begin before unused
        inputs are computed.

    Returns:
      A tree like the state.
    """

    def run(current: Any, *arguments: Any) -> Any:
        new = function(current, *arguments)
        return cast_like(new, current)

    def is_pending(carry: Any) -> jax.Array:
        pending, _ = carry
        return pending

    def body(carry: Any) -> Any:
        pending, current, read = keep_in_loop((*carry, inputs))
        done = jnp.zeros_like(pending)
        return done, run(current, *read)

    if not tree_lib.is_traced(condition):  # outside jit, a loop would be compiled anew at each call
        return run(state, *inputs) if condition else state
    if narrow:
        return _run_once_narrowly(condition, run, state, *inputs)
    _, result = jax.lax.while_loop(is_pending, body, (condition, state))
    return result


def _run_once_narrowly(
    condition: jax.Array | bool,
    function: Callable[..., Any],
    state: Any,
    *inputs: Any,
) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    values = [*leaves, *jax.tree.leaves(inputs)]
    trace = jax.make_jaxpr(function)
    program = trace(state, *inputs)
    compute = jax.extend.core.jaxpr_as_fun(program)
    changed, read = _changed_and_read(program.jaxpr, len(leaves))

    def change(current: list, given: list) -> list:
        # The program takes all arguments. Those that it neither changes nor reads come from outside of the loop.
        arguments = list(values)
        _put(arguments, changed, current)
        _put(arguments, read, given)
        results = compute(*arguments)
        return _take(results, changed)

    new = run_once(condition, change, _take(leaves, changed), _take(values, read))
    _put(leaves, changed, new)
    return jax.tree.unflatten(treedef, leaves)


def _take(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [values[i] for i in indices]


def _put(values: list[Any], indices: Sequence[int], new: Sequence[Any]) -> None:
    for i, value in zip(indices, new, strict=True):
        values[i] = value


def _changed_and_read(program: jax.extend.core.Jaxpr, number: int) -> tuple[list[int], list[int]]:
    """Tells which of the first `number` arguments come out changed, and which others are read at all."""
    operands = []
    for equation in program.eqns:
        operands += equation.invars
    changed = []
    for i in range(number):
        result = program.outvars[i]
        if result is not program.invars[i]:
            changed.append(i)
            operands.append(result)
    used = set(filter(is_variable, operands))
    read = []
    for i, argument in enumerate(program.invars):
        if argument in used and i not in changed:
            read.append(i)
    return changed, read


def is_variable(operand: Any) -> bool:
    """Whether an operand in a traced program is a variable, and no constant."""
    return not isinstance(operand, jax.extend.core.Literal)


def cast_like(new: Any, old: Any) -> Any:
    """Casts the new tree to the dtypes of the old one, as the carry of a loop asks for."""

    def cast(leaf: Any, like: Any) -> jax.Array:
        dtype = jnp.result_type(like)
        return jnp.asarray(leaf, dtype)

    return jax.tree.map(cast, new, old)


def keep_in_loop(values: Any) -> Any:
    """Hides from XLA that the body of a loop reads values from outside: what is computed from them stays in the loop.

    Without this, XLA may move whatever stays the same from one iteration to the next out of the body. In a loop that
    runs zero or one times, that is all that depends on its inputs alone, such as scores. Every step would pay for it.
    """
    return jax.lax.optimization_barrier(values)


def keep_whole(joined: jax.Array) -> jax.Array:
    """Hides from XLA that an array was concatenated from many parts.

    Without this, XLA turns a sum over parts into a chain of additions. It moves the reshapes between them one at a
    time, and runs all its simplifications for each: 3 s for 96 parts. Seen with jaxlib 0.10.2 on CPU.
    """
    return jax.lax.optimization_barrier(joined)


def jit_when_eager(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles a function as a whole where it is called by itself; inside of a program it is unchanged.

    Without this, JAX compiles and starts each of its operations alone. It is meant for functions of one leaf, which are
    then compiled once for all leaves of the same shape. `options` are those of `jax.jit`.
    """
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if tree_lib.has_traced((arguments, named)):
            return function(*arguments, **named)
        return compiled(*arguments, **named)

    return call


def compute_apart(function: Callable[..., Any], *inputs: Any) -> Any:
    """Calls `function(*inputs)` in a branch that is always taken, so that it is not fused with what surrounds it.

    XLA fuses nothing across the border of a branch. Fusion computes what the function reads anew for each result, and
    results may round otherwise than in a loop. A barrier alone does not help: it is gone before XLA fuses.
    """
    if not tree_lib.has_traced(inputs):
        return function(*inputs)
    return _in_branch(function, *inputs)


def hide_constants(values: Any, beside: Any) -> list[jax.Array]:
    """Makes arrays of numbers whose values XLA does not see; they are computed `beside` other values.

    XLA compiles equal programs once, but two that differ by a constant separately. 96 comparisons with elements of one
    table take 1.3 s with constant indices, and 0.15 s with hidden ones. A barrier alone does not hide a constant.
    Without values of a loop beside it, the branch would be moved out of the loop. Seen with jaxlib 0.10.2 on CPU.
    jaxlib 0.12 moves it even so, at the cost of a branch of scalars in each step.
    """

    def constants(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return inputs

    arrays = [jnp.asarray(value) for value in values]
    return list(_in_branch(constants, *arrays, beside=beside))


def draw_in_loop(function: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Draws random numbers, `function(key)`, inside the loop of a mask update.

    The counters of the generator depend on the shape alone. Without a branch, XLA computes them outside the loop, in
    every step; `keep_in_loop` does not help, since they are computed from no value that the loop reads.
    """
    return _in_branch(function, key)


def _in_branch(
    function: Callable[..., Any],
    *inputs: Any,
    beside: Any = None,
) -> Any:
    """Calls a function in a `cond` that always takes it, which XLA cannot see."""

    def zeros_like(result: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(result.shape, result.dtype)

    def zeros(*inputs: Any) -> Any:
        results = jax.eval_shape(function, *inputs)
        return jax.tree.map(zeros_like, results)

    # A condition that XLA can see through would take the branch away.
    true = jnp.bool_(True)
    always, _ = jax.lax.optimization_barrier((true, beside))
    return jax.lax.cond(always, function, zeros, *inputs)


def sum_squares_in_passing(values: jax.Array) -> jax.Array:
    """Sums the squares of values that are computed while they are summed, and never written to memory.

    Without this, XLA writes values that a `jnp.where` chooses to memory before it sums them. A reduction with two
    results reads them in passing, as long as both are needed: here the largest magnitude says whether the sum is zero.
    XLA also compiles such a reduction once for all values of one shape, and each lone sum separately. Seen with jaxlib
    0.10.2 on CPU.
    """

    def combine(first: tuple, second: tuple) -> tuple:
        first_sum, first_maximum = first
        second_sum, second_maximum = second
        return first_sum + second_sum, jnp.maximum(first_maximum, second_maximum)

    results = jnp.square(values), jnp.abs(values)
    last = max(values.ndim - 1, 0)
    last_axis, other_axes = range(last, values.ndim), range(last)
    for axes in (last_axis, other_axes):
        starts = jnp.float32(0), jnp.float32(0)
        results = jax.lax.reduce(results, starts, combine, axes)
    total, largest = results
    return jnp.where(largest > 0, total, 0)
