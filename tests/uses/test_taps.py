"""What goes into an operation, observed while the program runs, is what the trace says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.uses import UnsupportedPrimitive, param_uses, run_with_taps

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


def test_a_view_reads_the_operand_from_its_parameter(observed):
    results, named, found = observed
    np.testing.assert_allclose(results[0], jax.jit(_apply)(PARAMS, X), rtol=1e-5)
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


def _in_condition(params, x):
    return jax.lax.while_loop(lambda x: (x @ params['w']).sum() > 0, lambda x: x - 1, x)


def _one_of_two(params, x):
    return jax.lax.cond(x.sum() > 0, lambda: params['w'], lambda: x.T @ x) + 1


def _returned(params, x):
    return x, params['w']


REFUSED = [(_in_condition, 'condition of a loop'), (_one_of_two, 'no tap'), (_returned, 'no tap')]


@pytest.mark.parametrize(('apply', 'message'), REFUSED)
def test_what_cannot_be_observed(apply, message):
    params = {'w': _normal(4, 4)}
    graph = param_uses(apply, params, X)
    with pytest.raises(UnsupportedPrimitive, match=message):
        run_with_taps(graph, graph['w'], lambda use, operands: 0.0, params, X)
