"""What is known of removed channels, against the model itself: groups are zeroed, and each value is looked at."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.analysis import zeros
from jaxpruner.structure.analysis.positions import occurrences
from jaxpruner.structure.analysis.records import TracePosition
from jaxpruner.trace.program import Program
from structure import permuted


class _Recorded(zeros.ZeroWalk):
    """Keeps what is known of the results of each equation, in the last pass through loops."""

    def __init__(self, trace):
        super().__init__(trace)
        self.fills = {}

    def visit_equation(self, equation, operands, position):
        results = super().visit_equation(equation, operands, position)
        self.fills[position.path] = results
        return results


class _Zeroed(permuted.Check):
    """Runs the zeroed program beside the whole one, and compares it with what is known."""

    def __init__(self, trace, removed, fills):
        super().__init__(trace, {})
        self.removed = removed
        self.fills = fills

    def visit_equation(self, equation, operands, position):
        results = super().visit_equation(equation, operands, position)
        if any(position.needed):
            axes = self.trace.equations[position.path].results
            fills = self.fills[position.path]
            for twin, axes_of_result, fill in zip(results, axes, fills, strict=True):
                self.look(twin, axes_of_result, fill, f'{position.path} {equation}')
        return results

    def look(self, twin, axes, fill, place):
        value = twin.permuted
        if value is None or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            return
        value = np.asarray(value)
        assert -1 in fill.signs or not (value < 0).any(), place
        assert 1 in fill.signs or not (value > 0).any(), place
        if fill.everywhere is not None:
            np.testing.assert_allclose(value, fill.everywhere, rtol=1e-6, err_msg=place)
        for i, axis in enumerate(axes):
            for found in occurrences(axis):
                known = fill.at(i, found.atom) if found.atom in self.removed else None
                if known is None or not np.isfinite(known):
                    continue
                where = found.positions()[self.removed[found.atom]].ravel()
                at_removed = np.take(value, where, axis=i)
                np.testing.assert_allclose(at_removed, known, rtol=1e-5, atol=1e-6, err_msg=place)
                self.moved += 1

    def compare(self, twin, axes, place):
        self.compared += 1


def check(graph, params, inputs, seed=0, state=()):
    """Raises AssertionError where a number that counts as known is another one; returns how many were looked at.

    All exact groups are zeroed together, and each other group by itself: what is not finite would spread.
    """
    exact = [group for group in graph.groups.values() if group.exact]
    others = [[group] for group in graph.groups.values() if not group.exact]
    rng = np.random.default_rng(seed)
    trees = (params, state), inputs
    return sum(_check(graph, groups, *trees, rng) for groups in [exact, *others] if groups)


def _check(graph, groups, cuttable, inputs, rng):
    removed = {}
    for group in groups:
        removed[group.atom] = rng.permutation(group.size)[: max(1, group.size // 2)]
    trace = graph.trace
    recorded = _Recorded(trace)
    leaves = map(recorded.zeroed, trace.leaves)
    states = {path: recorded.zeroed(axes) for path, axes in trace.named_states}
    recorded.run(list(leaves), states)
    run = _Zeroed(trace, removed, recorded.fills)
    arguments = []
    axes_of_leaves = (*trace.leaves, *trace.states)
    for leaf, axes in zip(jax.tree.leaves(cuttable), axes_of_leaves, strict=True):
        arguments.append(permuted.Twin(jnp.asarray(leaf), _zeroed(leaf, axes, removed)))
    for leaf in jax.tree.leaves(inputs):
        arguments.append(permuted.Twin(jnp.asarray(leaf), jnp.asarray(leaf)))
    place = TracePosition(needed=(True,) * len(trace.program.jaxpr.outvars))
    run.visit_program(Program.of(trace.program), arguments, place)
    return run.moved


def _zeroed(leaf, axes, removed):
    leaf = np.array(leaf)
    for i, axis in enumerate(axes):
        for found in occurrences(axis):
            if found.atom in removed:
                where = found.positions()[removed[found.atom]].ravel()
                leaf[(slice(None),) * i + (where,)] = 0
    return jnp.asarray(leaf)
