"""Consumers of removed channels, fitted to calibration inputs: against NumPy, and the error that is left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def mlp(p, x):
    return jnp.tanh(x @ p['up'] + p['bias']) @ p['down'] + x[:, :2]


PARAMS = {'up': normal(0, 3, 6), 'bias': normal(1, 6), 'down': normal(2, 6, 2)}
BATCHES = [normal(3, 8, 3), normal(4, 8, 3), normal(5, 16, 3)]
KEEP = {'up[1]': [0, 2, 3]}


def graph_of(apply_fn, params, x):
    """Of shapes, so that nothing is compiled to verify each cut."""
    return channel_groups(apply_fn, params, jax.ShapeDtypeStruct(x.shape, x.dtype))


def errors(graph, params, keep, versions, inputs):
    """Of the small model's results with each version of its parameters, as shares of the whole one's."""
    whole = jax.jit(graph.model.apply_fn)(params, inputs)
    small_apply = jax.jit(graph.small_apply(keep))
    distances = [jnp.linalg.norm(small_apply(small, inputs) - whole) for small in versions]
    return np.array(distances) / jnp.linalg.norm(whole)


@pytest.mark.parametrize('sequential', [False, True])
def test_rows_are_those_of_least_squares(sequential):
    graph = channel_groups(mlp, PARAMS, BATCHES[0])
    small = graph.refit(PARAMS, KEEP, iter(BATCHES), damping=0.0, sequential=sequential)
    x = np.concatenate(BATCHES).astype(np.float64)
    hidden = np.tanh(x @ PARAMS['up'] + PARAMS['bias'])
    kept = hidden[:, KEEP['up[1]']]
    expected, *_ = np.linalg.lstsq(kept, hidden @ np.asarray(PARAMS['down']), rcond=None)
    np.testing.assert_allclose(small['down'], expected, rtol=1e-4, atol=1e-5)
    cut = graph.shrink(PARAMS, KEEP)
    for name in ('up', 'bias'):
        np.testing.assert_array_equal(small[name], cut[name])


def test_much_damping_is_the_plain_cut():
    graph = graph_of(mlp, PARAMS, BATCHES[0])
    small = graph.refit(PARAMS, KEEP, BATCHES, damping=1e5)
    np.testing.assert_allclose(small['down'], PARAMS['down'][np.array(KEEP['up[1]'])], atol=1e-4)


def test_what_others_can_stand_for_is_lost_without_an_error():
    """Each removed channel is a sum of two that stay; two kernels and a stack of layers sum over them."""
    params = {
        'a': normal(0, 4, 6),
        'b': normal(1, 6, 5),
        'c': normal(2, 6, 3),
        'd': normal(3, 5, 3),
    }
    params['a'] = params['a'].at[:, 4].set(params['a'][:, 0] + params['a'][:, 1])
    params['b'] = params['b'].at[:, 2].set(params['b'][:, 0] - 2 * params['b'][:, 4])

    def apply(p, x):
        hidden = x @ p['a']
        return (hidden @ p['b']) @ p['d'] + hidden**1 @ p['c']

    x = normal(4, 30, 4)
    graph = graph_of(apply, params, x)
    keep = {'a[1]': [0, 1, 2, 3, 5], 'b[1]': [0, 1, 3, 4]}
    small = graph.refit(params, keep, [x], damping=1e-6)
    fitted, plain = errors(graph, params, keep, [small, graph.shrink(params, keep)], x)
    assert fitted < 1e-3
    assert plain > 0.1


def conv(x, kernel, groups=1):
    layout = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), 'SAME', dimension_numbers=layout, feature_group_count=groups
    )


def convolutions(p, x):
    x = jax.nn.relu(conv(x, p['first']))
    x = jax.nn.relu(conv(x, p['depthwise'], groups=8))
    x = jax.nn.relu(conv(x, p['second']))
    return x.reshape(len(x), -1) @ p['out']


def layers(p, x):
    def layer(x, p):
        query = jnp.einsum('...ti,iho->...hto', x, p['query'])
        weights = jax.nn.softmax(query @ jnp.swapaxes(query, -1, -2))
        x = x + jnp.einsum('...hto,hoi->...ti', weights @ query, p['mix'])
        return x + jnp.tanh(x @ p['up']) @ p['down'], None

    return jax.lax.scan(layer, x, p)[0]


MODELS = {
    'convolutions': (
        convolutions,
        {'first': (3, 3, 2, 8), 'depthwise': (3, 3, 1, 8), 'second': (3, 3, 8, 6), 'out': (24, 3)},
        (60, 2, 2, 2),
        {'first[3]': [0, 1, 3, 5, 6, 7], 'second[3]': [0, 2, 3, 5]},
    ),
    'scan and heads': (
        layers,
        {'query': (2, 6, 3, 4), 'mix': (2, 3, 4, 6), 'up': (2, 6, 8), 'down': (2, 8, 6)},
        (20, 5, 6),
        {'query[2]': [0, 2], 'up[2]': [[0, 1, 2, 4, 5], [1, 2, 5, 6, 7]]},
    ),
}


@pytest.mark.parametrize(('apply_fn', 'shapes', 'inputs', 'keep'), MODELS.values(), ids=MODELS)
def test_less_is_lost_than_by_the_plain_cut(apply_fn, shapes, inputs, keep):
    params = {name: normal(i, *shape) / 3 for i, (name, shape) in enumerate(shapes.items())}
    x, unseen = normal(8, *inputs), normal(9, *inputs)
    graph = graph_of(apply_fn, params, x)
    small = graph.refit(params, keep, [x])
    versions = [small, graph.shrink(params, keep)]
    for each in (x, unseen):
        fitted, plain = errors(graph, params, keep, versions, each)
        assert fitted < 0.8 * plain


def test_a_state_comes_first_in_a_batch():
    def apply(p, state, x):
        hidden = jnp.tanh(x @ p['up'] + p['bias']) * state['scale']
        return hidden @ p['down'], {'scale': state['scale']}

    state = {'scale': jnp.arange(1.0, 7.0)}
    x = jnp.concatenate(BATCHES)
    shapes = jax.eval_shape(lambda: (x, state))
    graph = channel_groups(apply, PARAMS, shapes[0], state=shapes[1])
    small, small_state = graph.refit(PARAMS, KEEP, [(state, x)]), graph.shrink(state, KEEP)
    whole, _ = apply(PARAMS, state, x)
    small_apply = jax.jit(graph.small_apply(KEEP))
    fitted, _ = small_apply(small, small_state, x)
    plain, _ = small_apply(graph.shrink(PARAMS, KEEP), small_state, x)
    assert jnp.linalg.norm(fitted - whole) < 0.8 * jnp.linalg.norm(plain - whole)


def tied(p, numbers):
    hidden = p['tokens'][numbers]
    hidden = hidden + jnp.tanh(hidden @ p['up']) @ p['down']
    return hidden @ p['tokens'].T


def test_leaves_that_are_left_out_are_named():
    params = {'tokens': normal(0, 7, 4), 'up': normal(1, 4, 6), 'down': normal(2, 6, 4)}
    numbers = jnp.arange(40) % 7
    graph = graph_of(tied, params, numbers)
    keep = {'tokens[1]': [0, 1, 3], 'up[1]': [0, 2, 3, 4]}
    with pytest.warns(UserWarning, match=r'tokens \(data look up its rows, too\)') as warnings:
        small = graph.refit(params, keep, [numbers])
    assert len(warnings) == 1
    np.testing.assert_array_equal(small['tokens'], graph.shrink(params, keep)['tokens'])
    assert not np.allclose(small['down'], graph.shrink(params, keep)['down'])


def test_kernels_that_are_not_read_as_they_are_are_named():
    def apply(p, x):
        return jnp.tanh(x @ p['up'] + p['bias']) @ (p['down'] / jnp.linalg.norm(p['down'], axis=0))

    graph = graph_of(apply, PARAMS, BATCHES[0])
    with pytest.warns(UserWarning, match=r'down \(what is contracted at .* is computed'):
        small = graph.refit(PARAMS, KEEP, BATCHES)
    np.testing.assert_array_equal(small['down'], graph.shrink(PARAMS, KEEP)['down'])


def test_it_is_said_where_nothing_is_fitted():
    graph = graph_of(mlp, PARAMS, BATCHES[0])
    with pytest.warns(UserWarning, match='nothing is fitted'):
        graph.refit(PARAMS, {'up[1]': range(6)}, BATCHES)


REFUSED = {
    'no batches': (KEEP, [], ValueError, 'batches are empty'),
    'another number of inputs': (KEEP, [(BATCHES[0], BATCHES[0])], TypeError, '2'),
    'an unknown group': ({'down[1]': [0]}, BATCHES, KeyError, r"no group 'down\[1\]'"),
    'infinite inputs': (KEEP, [BATCHES[0].at[0, 0].set(jnp.nan)], ValueError, 'down.*not finite'),
}


@pytest.mark.parametrize(('keep', 'batches', 'error', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(keep, batches, error, message):
    graph = graph_of(mlp, PARAMS, BATCHES[0])
    with pytest.raises(error, match=message):
        graph.refit(PARAMS, keep, batches)
