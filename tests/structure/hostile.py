"""Models of one group, `up[1]`, that is exact or only looks so: name -> (function of hidden channels, exact).

The model is `function(x @ up) @ down`, of hidden channels of shape (2, 6); `down` has a row for each channel.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TABLE = np.sin(np.arange(6.0, dtype=np.float32) + 1)
ROWS = np.array([[True], [False]])


def two_pass_norm(h):
    centred = h - h.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def one_pass_norm(h):
    mean = h.mean(-1, keepdims=True)
    return (h - mean) * lax.rsqrt((h * h).mean(-1, keepdims=True) - mean**2 + 1e-6)


def scaled(h, factor):
    return h * factor.sum(-1, keepdims=True)


def outer(h, combine):
    """A table of pairs of channels, summed over the second of each."""
    return combine(h[:, :, None], h[:, None, :]).sum(-1)


def recurrent(h, first):
    """A state that begins with a number; the sum of all states scales the channels."""
    states = lax.scan(lambda state, row: (state * row, state), jnp.full(6, first), h)[1]
    return scaled(h, states)


def until_small(h, size):
    """Halves the channels until their size is small, a few times at most."""

    def again(carried):
        count, h = carried
        return (count < 9) & (size(h) > 0.5)

    return lax.while_loop(again, lambda carried: (carried[0] + 1, carried[1] / 2), (0, h))[1]


def padded(h, number):
    """A row of a number is put before the others; the sum of all scales the channels."""
    return h * jnp.pad(h, ((1, 0), (0, 0)), constant_values=number).sum()


def branches(h, other):
    return scaled(h, lax.cond(h.sum() > 0, lambda h: h * 2, other, h))


def rows_at(h, number):
    """Rows at indices of which one is beyond the end."""
    taken = h.at[jnp.array([0, 9])].get(mode='fill', fill_value=number)
    return scaled(h, taken)


def finite_segments(h):
    """Rows with elements have h + 5, which is 5 at zeroed channels, and the others have 0."""
    segments = jax.ops.segment_max(h, jnp.array([1, 1]), 2)
    return jnp.where(jnp.isfinite(segments), segments + 5, 0)


def largest(h, values, reduce=jnp.max):
    """The largest of some values of the channels scales them all."""
    return h * reduce(values, axis=-1, keepdims=True)


def quantized(h):
    """int8 with a scale for each row, as dynamic quantization has it."""
    scale = jnp.abs(h).max(-1, keepdims=True) / 127
    return jnp.round(h / scale).clip(-127, 127).astype(jnp.int8).astype(jnp.float32) * scale


def accumulated(h, step):
    """A state that begins with zero; the largest of all states scales the channels."""
    state = lax.scan(lambda state, row: (step(state, row), None), jnp.zeros(6), h)[0]
    return largest(h, state)


MODELS = {
    'relu': (jax.nn.relu, True),
    'mean over a mapped batch': (
        lambda h: jax.vmap(lambda row: row - lax.pmean(row, 'batch'), axis_name='batch')(h),
        True,
    ),
    'Fourier transform of the batch': (lambda h: jnp.fft.fft(h, axis=0).real, True),
    'largest row': (lambda h: h * jnp.argmax(jnp.abs(h), axis=0), True),
    'softmax over channels': (jax.nn.softmax, False),
    'largest channel': (lambda h: h * h.max(-1, keepdims=True), False),
    'largest of relu': (lambda h: largest(h, jax.nn.relu(h)), True),
    'largest magnitude': (lambda h: largest(h, jnp.abs(h)), True),
    'largest even power': (lambda h: largest(h, h**4), True),
    'largest odd power': (lambda h: largest(h, h**3), False),
    'largest difference': (lambda h: largest(h, jnp.abs(h) - jax.nn.relu(h)), False),
    'largest of two': (lambda h: largest(h, jnp.maximum(jnp.abs(h), 2 * h)), True),
    'largest product with rows': (
        lambda h: largest(h, jnp.abs(jnp.ones((2, 2))) @ jax.nn.relu(h)),
        True,
    ),
    'largest negated relu': (lambda h: largest(h, -jax.nn.relu(h)), False),
    'smallest negated relu': (lambda h: largest(h, -jax.nn.relu(h), jnp.min), True),
    'largest of rows beside others': (
        lambda h: largest(h, jnp.concatenate([jax.nn.relu(h), 0 * h[:1], h[:1] ** 2]).sum(0)),
        True,
    ),
    'largest state': (lambda h: accumulated(h, lambda state, row: state + jnp.abs(row)), True),
    'largest state of any sign': (lambda h: accumulated(h, lambda state, row: state - row), False),
    'scales of int8': (quantized, True),
    'sum of channels': (lambda h: scaled(h, h), True),
    'sum of exact gelu': (lambda h: scaled(h, jax.nn.gelu(h, approximate=False)), True),
    'sum of softplus': (lambda h: scaled(h, jax.nn.softplus(h)), False),
    'sum of a shifted channel': (lambda h: scaled(h, h + 1), False),
    'shifted and back': (lambda h: scaled(h, h + 1 - 1), True),
    'shifted without a sum': (lambda h: h + 1, True),
    'product of channels': (lambda h: h * h.prod(-1, keepdims=True), False),
    'product of exponentials': (lambda h: h * jnp.exp(h).prod(-1, keepdims=True), True),
    'any channel': (lambda h: h * (h > 0).any(-1, keepdims=True), True),
    'all channels': (lambda h: h * (h > 0).all(-1, keepdims=True), False),
    'two-pass norm': (two_pass_norm, False),
    'one-pass norm': (one_pass_norm, True),
    'instance norm': (lambda h: h * lax.rsqrt(h.var(0) + 1e-6), True),
    'logarithm': (jnp.log, False),
    'divided by itself': (lambda h: h / h, False),
    'reciprocal where it can be': (
        lambda h: jnp.where(h == 0, 0, 1 / jnp.where(h == 0, 1, h)),
        True,
    ),
    'logarithm in a branch of where': (lambda h: jnp.where(h > 0.1, jnp.log(h), h), True),
    'rows masked in float16': (
        lambda h: h * jnp.exp(jnp.where(ROWS, h.astype(jnp.float16), -np.inf)),
        True,
    ),
    'times infinity': (lambda h: h * np.array([1, 1, 1, np.inf, 1, 1], np.float32), False),
    'masked by minus infinity': (lambda h: jnp.exp(jnp.where(h > 1, h, -np.inf)), True),
    'table without a sum': (lambda h: h + TABLE, True),
    'table times channels': (lambda h: scaled(h, h * TABLE), True),
    'sums of pairs': (lambda h: outer(h, jnp.add), False),
    'products of pairs': (lambda h: outer(h, jnp.multiply), True),
    'padded by zeros': (lambda h: padded(h, 0), True),
    'padded by ones': (lambda h: padded(h, 1), False),
    'beside zeros': (lambda h: scaled(h, jnp.concatenate([h, jnp.zeros((1, 6))]).sum(0)), True),
    'state from zero': (lambda h: recurrent(h, 0.0), True),
    'state from one': (lambda h: recurrent(h, 1.0), False),
    'loop until a sum is small': (lambda h: until_small(h, lambda h: (h * h).sum()), True),
    'loop until exponentials are small': (
        lambda h: until_small(h, lambda h: jnp.exp(h).sum()),
        False,
    ),
    'branches of zeros': (lambda h: branches(h, lambda h: -h), True),
    'branches of zeros and ones': (lambda h: branches(h, lambda h: h + 1), False),
    'rows filled by zeros': (lambda h: rows_at(h, 0), True),
    'cumulated over rows': (lambda h: scaled(h, jnp.cumsum(h, 0)), True),
    'replaced rows': (lambda h: scaled(h, h.at[0].set(1.0)), False),
    'rows set to zero': (lambda h: scaled(h, h.at[0].set(0.0)), True),
    'finite or not': (lambda h: scaled(h, finite_segments(h)), False),
    'powers': (lambda h: scaled(h, h**3), True),
    'inverse power': (lambda h: h**-2, False),
}
