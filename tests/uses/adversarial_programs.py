"""Whole programs in which parameters are easily lost: derivatives, loops in loops, weights that are made of others.

Like those in `adversarial_models`, but of more than a line.
"""

import jax
import jax.numpy as jnp
from jax import lax

from uses import layers
from uses.table import floats, tokens

X = floats(2, 4)
IMAGE = floats(2, 4, 4, 3)
MODELS = {}


def model(params, *inputs):
    """Adds a model to the table, with shapes of its parameters and inputs."""

    def add(apply_fn):
        MODELS[apply_fn.__name__.strip('_').replace('_', ' ')] = (apply_fn, params, *inputs)
        return apply_fn

    return add


@model({'a': floats(4, 5), 'b': floats(5, 3)}, X)
def _input_gradient_of_mlp(p, x):
    return jax.grad(lambda x: jnp.tanh(jnp.tanh(x @ p['a']) @ p['b']).sum())(x)


@model({'w': floats(2, 3, 3, 5)}, IMAGE)
def _input_gradient_of_conv(p, x):
    return jax.grad(lambda x: jnp.tanh(layers.conv(x, p['w'], window_strides=(2, 1))).sum())(x)


@model({'w': floats(4, 3)}, X)
def _inner_update(p, x):
    g = jax.grad(lambda w: jnp.tanh(x @ w).sum())(p['w'])
    return x @ (p['w'] - 0.1 * g)


@model({'w': floats(3, 4, 4)}, X)
def _input_gradient_of_scan(p, x):
    return jax.grad(lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p['w'])[0].sum())(x)


@model({'w': floats(2, 3, 3, 5, 4)}, floats(5, 2, 4, 4, 3))
def _input_gradient_of_conv_over_both(p, x):
    return jax.grad(lambda x: jnp.tanh(jax.vmap(layers.conv, (0, 3))(x, p['w'])).sum())(x)


@model({'a': floats(4, 4), 'b': floats(4, 4)}, X)
def _heterogeneous_layers_by_counter(p, x):
    return lax.fori_loop(
        0,
        4,
        lambda i, x: lax.switch(
            i % 2, [lambda x: jnp.tanh(x @ p['a']), lambda x: jnp.tanh(x @ p['b'].T)], x
        ),
        x,
    )


@model({'w': floats(5, 4)}, tokens(3))
def _one_hot_embedding(p, i):
    return jax.nn.one_hot(i, 5) @ p['w']


@model({'w': floats(5, 3, 4)}, floats(2, 4, 5))
def _contraction_in_other_order(p, x):
    return jnp.einsum('bij,joi->bo', x, p['w'])


@model({'w': floats(4, 3)}, X)
def _by_hand(p, x):
    return (x[:, :, None] * p['w']).sum(1)


@model({'w': floats(4, 2, 3)}, X)
def _repeated_heads(p, x):
    return jnp.einsum('bi,ihd->bhd', x, jnp.repeat(p['w'], 2, 1))


@model({'w': floats(4, 3)}, X)
def _tiled_outputs(p, x):
    return x @ jnp.tile(p['w'], (1, 2))


@model({'a': floats(2, 2, 1, 5), 'b': floats(2, 2, 2, 5)}, IMAGE)
def _kernels_above_each_other(p, x):
    return layers.conv(x, jnp.concatenate([p['a'], p['b']], 2))


@model({'w': floats(2, 2, 3, 6)}, IMAGE)
def _kernel_split(p, x):
    a, b = jnp.split(p['w'], 2, -1)
    return jnp.tanh(layers.conv(x, a)) * layers.conv(x, b)


@model({'a': floats(3, 2), 'b': floats(2, 2, 2, 5)}, IMAGE)
def _kernel_from_factors(p, x):
    return layers.conv(x, jnp.einsum('ir,hwro->hwio', p['a'], p['b']))


@model({'w': floats(3, 5)}, floats(2, 4))
def _fourier(p, x):
    return jnp.fft.irfft(jnp.einsum('bf,fo->bo', jnp.fft.rfft(x), p['w']), axis=-1)


@model({'q': jax.ShapeDtypeStruct((4, 3), jnp.int8), 's': floats(3)}, X)
def _quantised(p, x):
    return x @ (p['q'].astype(jnp.float32) * p['s'])


@model({'w': floats(2, 3, 4, 5)}, X)
def _nested_stacked(p, x):

    def outer(c, w):
        return (c, lax.scan(lambda c, v: (c, v.T * 1.0), 0, w)[1])

    return jnp.einsum('bi,jkoi->bjko', x, lax.scan(outer, 0, p['w'])[1])


@model({'w': floats(4, 5), 'v': floats(3, 5)}, X)
def _stacked_from_others(p, x):
    t = lax.scan(lambda c, v: (c, p['w'] * v), 0, p['v'])[1]
    return jnp.einsum('bi,kio->bko', x, t)


@model({'w': floats(3, 4, 4)}, X)
def _shift_register(p, x):

    def body(c, w):
        x, last = c
        return ((jnp.tanh(x @ last), w), None)

    return lax.scan(body, (x, jnp.eye(4)), p['w'])[0][0]


@model({'w': floats(2, 5, 3, 4, 4)}, X)
def _scan_in_vmap_in_scan(p, x):

    def member(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    return lax.scan(lambda x, w: (jax.vmap(member, (0, None))(w, x).mean(0), None), x, p['w'])[0]


@model({'w': floats(3, 4, 4), 'b': floats(3, 4)}, X)
def _cond_in_scan(p, x):

    def body(x, layer):
        return (
            lax.cond(
                x.sum() > 0,
                lambda x, layer: jnp.tanh(x @ layer['w']),
                lambda x, layer: x + layer['b'],
                x,
                layer,
            ),
            None,
        )

    return lax.scan(body, x, p)[0]


@model({'w': floats(3, 4, 4)}, X)
def _while_in_scan(p, x):

    def body(x, w):
        return (
            lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1],
            None,
        )

    return lax.scan(body, x, p['w'])[0]


@model({'w': floats(4, 4, 4)}, X)
def _unrolled_scan(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p['w'], unroll=2)[0]


@model({'w': floats(6, 4, 4)}, X)
def _scan_of_pairs_halves(p, x):
    return lax.scan(
        lambda x, w: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None),
        x,
        p['w'].reshape(2, 3, 4, 4).swapaxes(0, 1),
    )[0]


@model({'w': floats(4, 12)}, X)
def _hyper_network(p, x):
    return jnp.einsum('bi,bio->bo', x, (x @ p['w']).reshape(2, 4, 3))


@model({'a': floats(4), 'b': floats(4)}, X)
def _where_by_data(p, x):
    return jnp.where(x > 0.5, p['a'], p['b']) * x


@model({'w': floats(4, 5)}, tokens(4, 2))
def _take_along_axis(p, i):
    return jnp.take_along_axis(p['w'], i, 1)


@model({'w': floats(3, 4, 5)}, X, tokens(2))
def _expert_choice(p, x, i):
    return jnp.einsum('bi,bio->bo', x, p['w'][i])


@model({'w': floats(4, 12, 5)}, floats(2, 4, 3))
def _local(p, x):
    return lax.conv_general_dilated_local(
        x, p['w'][:, :6], (1,), 'SAME', (2,), dimension_numbers=('NWC', 'WIO', 'NWC')
    )


@model({'w': floats(3, 4, 2, 5)}, floats(2, 6, 3, 4))
def _batch_dims_in_other_order(p, x):
    return lax.dot_general(x, p['w'], (((3,), (1,)), ((2, 0), (0, 2))))


@model({'w': floats(6, 5)}, X)
def _negative_pad(p, x):
    return x @ lax.pad(p['w'], 0.0, ((-1, -1, 0), (1, 0, 0)))


@model({'w': floats(3, 4, 4)}, X)
def _shared_between_scan_and_not(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p['w'])[0] @ p['w'][0].T


@model({'w': floats(3, 4, 4)}, X)
def _stack_carried_and_indexed_in_jit(p, x):

    def body(i, c):
        w, x = c
        return (w, jax.jit(lambda w, i, x: jnp.tanh(x @ w[i].T))(w, i, x))

    return lax.fori_loop(0, 3, body, (p['w'], x))[1]


@model({'w': floats(6, 4, 4)}, X)
def _flat_index_of_two_loops(p, x):
    return lax.fori_loop(
        0, 2, lambda i, x: lax.fori_loop(0, 3, lambda j, x: jnp.tanh(x @ p['w'][3 * i + j]), x), x
    )


@model({'w': floats(3, 2, 4, 4)}, X)
def _scanned_and_indexed(p, x):

    def body(x, w):
        return (lax.fori_loop(0, 2, lambda j, x: jnp.tanh(x @ w[j]), x), None)

    return lax.scan(body, x, p['w'])[0]


@model({'w': floats(2, 3, 4, 4)}, X)
def _indexed_then_scanned(p, x):
    return lax.fori_loop(
        0, 3, lambda j, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p['w'][:, j])[0], x
    )


@model({'w': floats(4, 4)}, X)
def _masked_by_two(p, x):
    return x @ jnp.triu(jnp.tril(p['w'], 1), -1)


@model({'k': floats(4, 3), 'q': floats(4, 3)}, floats(2, 4), floats(5, 3))
def _kv_cache(p, x, cache):
    cache = lax.dynamic_update_slice(cache, x @ p['k'], (1, 0))
    return x @ p['q'] @ cache.T


@model({'t': floats(3, 4), 'w': floats(4, 5)}, X)
def _prefix(p, x):
    return jnp.concatenate([p['t'], x]) @ p['w']


@model({'w': floats(4, 5)}, X)
def _remat_policy(p, x):
    f = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=jax.checkpoint_policies.dots_saveable)
    return f(p['w'], x)


@model({'s': floats(), 'w': floats(4, 5)}, X)
def _scalar_times_matrix(p, x):
    return x @ (p['s'] * p['w'])


@model({'a': floats(3, 4), 'b': floats(3, 5)}, X)
def _outer_in_vmap(p, x):
    return jax.vmap(lambda a, b: x @ jnp.outer(a, b))(p['a'], p['b'])


@model({'w': floats(4, 4)}, X)
def _sinkhorn(p, x):
    def normalize(_, w):
        w = w / w.sum(0, keepdims=True)
        return w / w.sum(1, keepdims=True)

    return x @ lax.fori_loop(0, 2, normalize, jnp.exp(p['w']))


@model({'w': floats(4, 4)}, X)
def _product_with_itself(p, x):
    return x @ (p['w'] @ p['w'].T)
