"""A model that is run from cut to cut does what it does as a whole, with the parameters that are there by then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.trace.segments import ProgramCut, Segments
from jaxpruner.trace.taps import Taps
from jaxpruner.uses import param_uses, run_with_taps

RNG = np.random.default_rng(0)


def _normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


PARAMS = {
    'in': _normal(4, 4),
    'stack': _normal(3, 4, 4),
    'shared': _normal(4, 4),
    'scale': _normal(4),
    'out': _normal(4, 4),
}
TABLE = np.asarray(RNG.normal(size=4), np.float32)
X = {'x': _normal(2, 4), 'flag': jnp.array(True)}


def _apply(params, inputs):
    x = jax.jit(lambda x, w: jnp.tanh(x @ w))(inputs['x'], params['in']) + TABLE
    scale = jnp.exp(params['scale'])  # made of parameters alone, read in the loop and after it

    def body(carried, w):
        x, count = carried
        x = jnp.tanh(x @ w * scale + x @ params['shared'])
        return (x, count + 1), x.sum(0)

    (x, count), sums = jax.lax.scan(body, (x, 0), params['stack'][::-1], reverse=True)
    x = jax.lax.cond(inputs['flag'], lambda x: x + sums.sum(0) * count, lambda x: x, x)
    return (x * scale) @ params['out']


@pytest.fixture(scope='module')
def graph():
    return param_uses(_apply, PARAMS, X)


def _operands(use, operands):
    return operands[1 - use.site.operand].sum(0)


def test_what_a_layer_meets_is_the_same_from_whichever_cut(graph):
    uses = [*graph['stack'], *graph['out']]
    (_, (stack, expected)) = jax.jit(
        lambda params, x: run_with_taps(graph, uses, _operands, params, x)
    )(PARAMS, X)
    segments = Segments(graph, uses)
    program, taps = segments.program, Taps([graph['out']], _operands)
    scan, last = program.scan_of(graph['stack']), program.place_of(graph['out'][0].site.path)
    assert program.scan_of(graph['shared']) is None
    inside = Taps([graph['stack']], _operands)
    observe = segments.observe(inside, ProgramCut(scan, 0), scan + 1)
    state, here = segments.begin(X), ProgramCut(0)
    for there in (
        ProgramCut(1),
        ProgramCut(scan),
        ProgramCut(scan, 0),
        ProgramCut(scan, 1),
        ProgramCut(scan, 2),
        ProgramCut(scan + 1),
        ProgramCut(last),
    ):
        state, here = segments.advance(PARAMS, state, here, there), there
        if there.trips is not None:  # the last element first, of a stack that is turned round
            (found,) = observe(inside.zeros(program.steps[scan].path), PARAMS, state, there.trips)
            np.testing.assert_allclose(found, stack[2 - there.trips], rtol=1e-5)
    (found,) = segments.observe(taps, here, last + 1)(taps.zeros(), PARAMS, state, None)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    at_once = segments.advance(PARAMS, segments.begin(X), ProgramCut(0), ProgramCut(last))
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), at_once, state)


def test_parameters_may_change_between_cuts(graph):
    segments = Segments(graph, graph['out'])
    scan = next(
        i for i, step in enumerate(segments.program.steps) if step.equation.primitive.name == 'scan'
    )
    middle, last = (
        ProgramCut(scan, 2),
        ProgramCut(segments.program.place_of(graph['out'][0].site.path)),
    )
    state = segments.advance(PARAMS, segments.begin(X), ProgramCut(0), middle)
    changed = PARAMS | {'in': PARAMS['in'] * 0, 'scale': PARAMS['scale'] + 1}
    found = segments.advance(changed, state, middle, last)
    again = segments.advance(PARAMS, state, middle, last)
    assert not np.allclose(jax.tree.leaves(found)[0], jax.tree.leaves(again)[0])
    only_in = segments.advance(changed | {'scale': PARAMS['scale']}, state, middle, last)
    jax.tree.map(np.testing.assert_array_equal, only_in, again)
