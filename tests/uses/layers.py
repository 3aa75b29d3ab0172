"""Layers and models of plain JAX from which adversarial models are made."""

import jax
import jax.numpy as jnp
from jax import lax


def conv(x, w, numbers=('NHWC', 'HWIO', 'NHWC'), **options):
    return lax.conv_general_dilated(
        x, w, **{'window_strides': (1, 1), 'padding': 'SAME', **options}, dimension_numbers=numbers
    )


def scan(body, first, *args, **options):
    return lax.scan(lambda carried, taken: (body(carried, taken), None), first, *args, **options)[0]


def learned_states(p, x):
    """A carry of three, of which the last is the parameter; constants stand before it."""

    def body(carried, taken):
        count, other, state = carried
        return (count + 1, other * 2, jnp.tanh(state @ p['w'] + taken)), state

    (_, other, state), states = lax.scan(body, (0, x[0], jnp.broadcast_to(p['h'], x[0].shape)), x)
    return other + state + states.sum(0)


@jax.custom_vjp
def matmul(x, w):
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def attention(p, x):
    """Projections to and from heads; the query's kernel has its heads last."""
    query = jnp.einsum('btf,fdh->bthd', x, p['q'])
    key = jnp.einsum('btf,hfd->bthd', x, p['k'])
    value = jnp.einsum('btf,dhf->bthd', x, p['v'])
    scores = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', query, key))
    return jnp.einsum('bhqk,bkhd,dho->bqo', scores, value, p['o'])


def nested(p, x):
    """Layers within groups: a scan in a scan, the inner axis first."""

    def group(x, ws):
        return scan(lambda x, w: jnp.tanh(x @ w), x, ws)

    return scan(group, x, jnp.swapaxes(p['w'], 0, 1))


def routed(p, x):
    """Tokens to experts, as many as each takes: dispatch and combine."""
    gate = jax.nn.softmax(x @ p['gate'])
    dispatched = jnp.einsum('te,tf->ef', gate, x)
    hidden = jax.vmap(lambda w, x: jnp.tanh(w @ x))(p['up'], dispatched)
    return jnp.einsum('te,eh,efh->tf', gate, hidden, p['down'])


def ring(p, x):
    """Weights that go round in what a loop carries."""

    def body(_, carried):
        x, a, b, c = carried
        return jnp.tanh(x @ a), b, c, a

    return lax.fori_loop(0, 5, body, (x, p['a'], p['b'], p['c']))[0]
