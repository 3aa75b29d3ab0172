"""What goes into an operation, observed while the program runs, is what the trace says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.trace.taps import run_with_taps
from jaxpruner.uses import UnsupportedPrimitive, param_uses
from uses import layers

RNG = np.random.default_rng(0)


def _normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def _apply(params, x):
    """Every way in which a program may hold another, and every way to read a parameter."""
    x = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), x)), x, params['stack'])[0]
    x = jax.lax.fori_loop(0, x.shape[0], lambda _, x: jnp.tanh(x @ params['looped']), x)
    x = jax.lax.while_loop(
        lambda x: jnp.abs(x).max() > 0.5, lambda x: jnp.tanh(x @ params['looped']) / 2, x
    )
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ params['yes'], lambda x: x @ params['no'], x)
    x = jax.jit(lambda x, w: x @ w)(x, params['square'].T)
    query, key = jnp.split(params['fused'].reshape(2, 2, 2, 8), 2, 2)
    x = x @ query.reshape(4, 8) @ key.transpose(3, 0, 2, 1).reshape(8, 4)
    both = jnp.concatenate(
        [params['yes'], params['no'].astype(jnp.bfloat16)[::-1].astype(jnp.float32)], 1
    )
    return x @ both[:, 2:6] + jnp.stack([params['bias'], -params['bias']])[0] @ jnp.pad(
        params['yes'], ((0, 0), (0, 0))
    )


PARAMS = {
    'stack': _normal(3, 4, 4),
    'looped': _normal(4, 4),
    'yes': _normal(4, 4),
    'no': _normal(4, 4),
    'square': _normal(4, 4),
    'fused': _normal(4, 16),
    'bias': _normal(4),
}
X = _normal(2, 4)


@pytest.fixture(scope='module')
def graph():
    return param_uses(_apply, PARAMS, X)


@pytest.fixture(scope='module')
def observed(graph):
    """The results, the exact uses with their leaves, and how often and with which operand each ran."""
    named = [
        (path[0], use)
        for path, uses in graph.items()
        for use in uses
        if use.exact and use.op == 'dot'
    ]

    def statistic(use, operands):
        return jnp.ones(()), operands[use.site.operand]

    def run(params, x):
        return run_with_taps(graph, [use for _, use in named], statistic, params, x)

    results, found = jax.jit(run)(PARAMS, X)
    return results, named, found


def test_results_are_those_of_the_model(observed):
    np.testing.assert_allclose(observed[0][0], jax.jit(_apply)(PARAMS, X), rtol=1e-5)


def test_a_view_reads_the_operand_from_its_parameter(observed):
    _, named, found = observed
    assert {name for name, _ in named} == {'stack', 'looped', 'yes', 'no', 'square', 'fused'}
    for (name, use), (runs, operand) in zip(named, found, strict=True):
        read = use.read(PARAMS[name])
        if use.site.view.region != tuple(
            (0, n) for n in operand.shape[-2:]
        ):  # others' part is zero
            operand = np.where(read != 0, operand, 0)
            assert np.count_nonzero(read) > 2
        times = 1 if use.stack else float(runs)
        np.testing.assert_allclose(read * times, operand, rtol=1e-5, err_msg=name)
        assert use.trips is None or np.sum(runs) == use.trips


def test_a_computed_operand_cannot_be_read():
    params = {'w': jnp.ones((4, 4))}
    graph = param_uses(lambda params, x: x @ (2 * params['w']), params, X)
    with pytest.raises(ValueError, match='computed from its parameter'):
        graph['w'][0].read(params['w'])


def test_conditions_of_loops_cannot_be_observed():
    def apply(params, x):
        return jax.lax.while_loop(lambda x: (x @ params['w']).sum() > 0, lambda x: x - 1, x)

    params = {'w': jnp.ones((4, 4))}
    graph = param_uses(apply, params, X)
    with pytest.raises(UnsupportedPrimitive, match='condition of a loop'):
        run_with_taps(graph, graph['w'], lambda use, operands: 0.0, params, X)


def test_a_learned_state_is_observed_among_the_operands_of_its_loop():
    params = {'w': _normal(4, 4), 'h': _normal(4)}
    for apply in (layers.learned_states, layers.learned_state_of_while):
        x = jnp.stack([X, X]) if apply is layers.learned_states else X
        graph = param_uses(apply, params, x)
        (use,) = graph['h']
        _, (found,) = run_with_taps(
            graph, [use], lambda use, operands: operands[use.site.operand], params, x
        )
        np.testing.assert_array_equal(found, np.broadcast_to(params['h'], X.shape))
        np.testing.assert_array_equal(found, use.read(params['h']))


def _one_of_two(params, x):
    return jax.lax.cond(x.sum() > 0, lambda: params['w'], lambda: x) + 1


def _state_that_is_replaced(params, x):
    return jax.lax.scan(lambda h, x: (params['w'], h), x, x[:, :, None])[1]


def _returned(params, x):
    return x, params['w']


@pytest.mark.parametrize('apply', [_one_of_two, _state_that_is_replaced, _returned])
def test_parameters_that_are_results_of_a_program_cannot_be_observed(apply):
    params = {'w': _normal(*X.shape)}
    graph = param_uses(apply, params, X)
    with pytest.raises(UnsupportedPrimitive, match='there is no tap'):
        run_with_taps(graph, graph['w'], lambda use, operands: operands[0], params, X)


def test_numbers_of_python_are_read():
    params = {'w': jnp.ones((4, 4)), 'scale': 2.0}
    graph = param_uses(lambda params, x: x @ params['w'] * params['scale'], params, X)
    (use,) = graph['scale']
    np.testing.assert_array_equal(use.read(params['scale']), 2.0)


def test_what_a_parameter_is_padded_with_is_not_read():
    params = {'w': _normal(3, 4)}
    graph = param_uses(
        lambda params, x: x @ jnp.pad(params['w'], ((1, 0), (0, 0)), constant_values=1), params, X
    )
    read = graph['w'][0].read(params['w'])
    np.testing.assert_array_equal(read, np.pad(params['w'], ((1, 0), (0, 0))))
    (back,) = jax.linear_transpose(graph['w'][0].read, params['w'])(read)
    np.testing.assert_array_equal(back, params['w'])
