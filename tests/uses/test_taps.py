"""Operands that cannot be observed while a program runs; `brute_force` observes all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.uses import UnsupportedPrimitive, param_uses, run_with_taps

RNG = np.random.default_rng(0)


def _normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X = _normal(2, 4)


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
