"""Channels that are removed from a compiled model: other parameters must not need them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse

X = jax.random.normal(jax.random.key(1), (4, 16))


def apply_fn(params, x):
    return jax.nn.relu(x @ params['up'] + params['bias']) @ params['down']


PARAMS = {
    'up': jax.random.normal(jax.random.key(0), (16, 64)).at[:, :32].set(0),
    'bias': jnp.ones(64).at[:32].set(0),
    'down': jax.random.normal(jax.random.key(2), (64, 8)),
}
ALIVE = {**PARAMS, 'bias': PARAMS['bias'].at[:3].set(0.5)}


def assert_same_results(apply, packed, params):
    np.testing.assert_allclose(apply(packed, X), apply_fn(params, X), rtol=1e-4, atol=1e-4)


def test_parameters_that_need_removed_channels_are_refused():
    apply, packed, report = sparse.compile(apply_fn, PARAMS, X, formats='channels')
    assert report.channels == {'up[1]': 32}
    assert_same_results(apply, packed, PARAMS)
    tuned = {**PARAMS, 'bias': 2 * PARAMS['bias']}
    assert_same_results(apply, apply.pack(tuned), tuned)
    with pytest.raises(ValueError, match=r'3 of the channels up\[1\] .* not zero'):
        apply.pack(ALIVE)


def layers(params, x):
    def layer(x, of_layer):
        hidden = jax.nn.relu(x @ of_layer['up'] + of_layer['bias'])
        return x + hidden @ of_layer['down'], None

    return jax.lax.scan(layer, x, params)[0]


def test_layers_that_keep_channels_of_their_own():
    up = jax.random.normal(jax.random.key(0), (2, 16, 8))
    up = up.at[0, :, :4].set(0).at[1, :, 4:].set(0)
    bias = jnp.zeros((2, 8))
    params = {'up': up, 'bias': bias, 'down': jax.random.normal(jax.random.key(2), (2, 8, 16))}
    apply, _, report = sparse.compile(layers, params, X, formats='channels')
    assert set(report.channels.values()) == {4}
    for changed in ({'bias': bias.at[0, 4:].set(0.5)}, {'bias': bias.at[0, 4].set(0.5)}):
        tuned = {**params, **changed}
        found = apply(apply.pack(tuned), X)
        np.testing.assert_allclose(found, layers(tuned, X), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r'1 of the channels .* not zero'):
        apply.pack({**params, 'bias': bias.at[0, 2].set(0.5)})
