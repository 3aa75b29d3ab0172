"""What a graph says of a model, against the model itself: weights are perturbed one by one, and derivatives are cut.

`check` finds three kinds of faults. An operand that does not depend on the parameter, or that another operand is. Axes
that do not lie where the graph says. Uses that the graph does not know of: once no derivative passes through the uses
of a leaf, none is left.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner import tree
from jaxpruner.trace import contractions
from jaxpruner.trace.interpreter import Position
from jaxpruner.trace.program import Program
from jaxpruner.trace.taps import TapRun, Taps
from jaxpruner.uses import UnsupportedPrimitive, param_uses, run_with_taps

# A weight is in an element of an operand if it changes it at least so much as any other, times this.
_DOMINANT = 0.5


def values_like(shapes, seed=0):
    """Random values for shapes: positive floats, since some are variances, and whole numbers that index anything."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.asarray(rng.uniform(0.25, 0.75, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)

    return jax.tree.map(draw, shapes)


def check(apply_fn, params, *inputs):
    """Raises AssertionError where the graph of a model is wrong; returns the graph.

    Args:
      apply_fn: the model.
      params: its parameters, or their shapes.
      *inputs: its inputs, or their shapes.
    """
    params, inputs = values_like((params, inputs))
    graph = param_uses(apply_fn, params, *inputs)
    paths, leaves, treedef = tree.flatten_with_paths(params)
    for number, path in enumerate(paths):

        def with_leaf(leaf, number=number):
            return jax.tree.unflatten(treedef, [*leaves[:number], leaf, *leaves[number + 1 :]])

        leaf = leaves[number]
        if path in graph.unused:
            _check_unused(apply_fn, with_leaf, leaf, inputs)
        uses = [use for use in graph.get(path, ()) if _is_observable(use)]
        if not uses or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        _check_axes(graph, uses, with_leaf, jnp.asarray(leaf), inputs, tree.path_string(path))
        if len(uses) == len(graph[path]):
            _check_complete(
                graph, uses, with_leaf, jnp.asarray(leaf), inputs, tree.path_string(path)
            )
    return graph


def _is_observable(use):
    try:
        Taps([[use]], lambda use, operands: 0.0)
    except UnsupportedPrimitive:
        return False
    return True


def _check_unused(apply_fn, with_leaf, leaf, inputs):
    results = [apply_fn(with_leaf(jnp.full_like(leaf, value)), *inputs) for value in (0, 1)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def _check_axes(graph, uses, with_leaf, leaf, inputs, name):
    """Each weight is perturbed by itself; where operands change says how axes lie."""
    for use in uses:
        shape = use.site.equation.invars[use.site.operand].aval.shape
        assert use.site.view.shape == shape, f'{name}: {use}'

    @jax.jit
    def operands_of(leaf):
        def statistic(use, operands):
            return jnp.ones(()), operands[use.site.operand].astype(jnp.float32)

        return run_with_taps(graph, uses, statistic, with_leaf(leaf), *inputs)[1]

    before = operands_of(leaf)
    size = 2.0 ** (-3 if jnp.finfo(leaf.dtype).bits < 32 else -10)
    perturbed = [leaf.at[index].add(size) for index in np.ndindex(leaf.shape)]
    after = [operands_of(each) for each in perturbed]
    for number, use in enumerate(uses):
        runs, operand = before[number]
        changes = np.stack(
            [np.abs(np.asarray(found[number][1]) - np.asarray(operand)) for found in after]
        )
        if not changes.any():
            assert use.trips is None, (
                f'{name}: {use} does not depend on it'
            )  # it stands in another branch
            continue
        _compare(use, changes.reshape((*leaf.shape, *operand.shape)), leaf.ndim, name)
        if use.exact:
            _check_read(use, leaf, operand, runs, name)


def _check_read(use, leaf, operand, runs, name):
    read = np.asarray(use.read(leaf), np.float32)
    inside = tuple(
        slice(*ends) for ends in (*(e.range for e in use.site.view.stack), *use.site.view.region)
    )
    operand, runs = np.asarray(operand), np.asarray(runs)
    times = (
        runs[tuple(slice(*e.range) for e in use.site.view.stack)].reshape(-1)[0]
        if runs.ndim
        else runs
    )
    np.testing.assert_allclose(
        read[inside] * times, operand[inside], rtol=2e-2, atol=1e-5, err_msg=f'{name}: {use}'
    )


def _compare(use, changes, rank, name):
    """The axes of the parameter that vary along each axis of the operand."""
    view = use.site.view
    count = changes.ndim - rank - len(view.axes)
    assert count == len([entry for entry in view.stack if entry.loop]), (name, use)
    inside = [slice(*entry.range) for entry in view.stack if entry.loop] + [
        slice(*ends) for ends in view.region
    ]
    changes = changes[(slice(None),) * rank + tuple(inside)]
    most = changes.max(axis=tuple(range(rank, changes.ndim)), keepdims=True)
    any_change = _along(changes > most * 1e-3, rank)
    dominant = _along(changes > most * _DOMINANT, rank) if not use.exact else any_change
    roles = contractions.Roles((), tuple(range(len(view.axes))), ())
    if use.op in ('dot', 'conv'):
        roles = contractions.roles(use.site.equation, use.site.operand)
    long = {axis for axis in range(rank) if changes.shape[axis] > 1}
    each = {
        role: [count + i for i in getattr(roles, role)] for role in ('contract', 'free', 'batch')
    }
    if all(entry.loop for entry in view.stack):
        each['stack'] = list(range(count))
    for role, axes in each.items():
        least, most_ = (set().union(*(found[i] for i in axes)) for found in (any_change, dominant))
        said = set(getattr(use, role)) & long
        assert least <= said <= least | most_, (
            f'{name}: {role} is {sorted(least | most_)}, and the graph says {use}'
        )


def _along(changed, rank):
    """For each axis of an operand those of the parameter: with another index along them, other elements change.

    Args:
      changed: bool `[*parameter, *operand]`.
      rank: of the parameter.
    """
    along = []
    for axis in range(rank, changed.ndim):
        others = tuple(k for k in range(rank, changed.ndim) if k != axis)
        projected = changed.any(axis=others)  # weights, then the axis
        found = set()
        for own in range(rank):
            for i, j in itertools.combinations(range(changed.shape[own]), 2):
                a, b = np.take(projected, i, own), np.take(projected, j, own)
                both = a.any(-1) & b.any(-1)
                if (both & (a != b).any(-1)).any():
                    found.add(own)
        along.append(found)
    return along


class _CutRun(TapRun):
    """No derivative goes through the operands that uses read from the parameter."""

    def visit_equation(self, equation, operands, position):
        operands = list(operands)
        for _, use in self.taps.within.get(position.path, ()):
            if use.site.path == position.path:
                number = use.site.operand
                operands[number] = lax.stop_gradient(operands[number])
        return super().visit_equation(equation, operands, position)

    def inside(self, position, state, element=None):
        return _CutRun(self.taps, state)


def _check_complete(graph, uses, with_leaf, leaf, inputs, name):
    taps = Taps([[use] for use in uses], lambda use, operands: 0.0)

    def loss(leaf):
        values = jax.tree.leaves((with_leaf(leaf), inputs))
        running = _CutRun(taps, dict(enumerate(taps.zeros())))
        program = Program.of(graph.program)
        results = running.visit_program(program, values, Position.of_whole(graph.program))
        floats = [result for result in results if jnp.issubdtype(result.dtype, jnp.inexact)]
        weights = [jnp.cos(jnp.arange(math.prod(r.shape))).reshape(r.shape) for r in floats]
        return sum(jnp.sum(jnp.real(r * w)) for r, w in zip(floats, weights, strict=True)) + 0.0

    try:
        derivative = jax.jit(jax.grad(loss))(leaf)
    except NotImplementedError:  # a barrier in the oldest JAX
        return
    except ValueError as error:
        if 'Reverse-mode' not in str(error):
            raise
        derivative = jax.jit(jax.jacfwd(loss))(leaf)
    assert not np.asarray(derivative).any(), f'{name}: it has uses beside {graph[name]}'
