"""Programs of every form at smaller shapes: loops, branches, calls, and rules of derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner.structure import channel_groups
from structure.doubles import doubles, in_doubles
from uses.table import scan

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=6)
KEY = jax.random.key(0)
KEEP = {'up[1]': [0, 2, 3]}


@jax.custom_vjp
def doubled_gradient(h):
    return jnp.sin(h)


doubled_gradient.defvjp(
    lambda h: (jnp.sin(h), h), lambda h, seed: (2 * seed * jnp.cos(h).reshape(h.shape),)
)


@jax.custom_jvp
def clipped(h):
    return jnp.maximum(h, 0)


@clipped.defjvp
def _(primals, tangents):
    (h,), (tangent,) = primals, tangents
    return clipped(h), jnp.where(h > -1, 3 * tangent, jnp.zeros(h.shape, h.dtype))


@jax.custom_vjp
def scaled_gradient(h, factor):
    del factor  # only the rule reads it
    return jnp.sin(h)


scaled_gradient.defvjp(
    lambda h, factor: (jnp.sin(h), factor), lambda factor, seed: (factor * seed, None)
)


@jax.custom_jvp
def sorted_rule(h):
    return jnp.sin(h)


@sorted_rule.defjvp
def _(primals, tangents):
    (h,), (tangent,) = primals, tangents
    return jnp.sin(h), jnp.sort(tangent, axis=-1)


def with_states(h):
    def body(state, row):
        return jnp.tanh(state + row * TABLE), state

    last, states = lax.scan(body, jnp.zeros(6), h, unroll=2)
    return states + last


def loop(h):
    def body(state):
        count, h = state
        return count + 1, h * 0.5 + jnp.sin(h)

    return lax.while_loop(lambda state: state[0] < 3, body, (0, h))[1]


def partly_used(h):
    """Calls and a scan of which some operands and results have no part in the model's."""

    @jax.jit
    def pair(first, second):
        return jnp.sin(first), jnp.cos(second)

    unused = jnp.exp(h)[:, ::-1]
    wanted, _ = pair(h, unused)

    def body(state, row):
        kept, dropped = state
        return (kept + row, dropped * jnp.exp(kept)), dropped

    (kept, _), _ = lax.scan(body, (jnp.zeros(6), jnp.ones(6)), wanted)
    return wanted + kept


def parts(h):
    joined = jnp.concatenate([h, jnp.sin(h), h], 1)
    middle, end = joined[:, 6:12], joined[:, 12:]
    first, second, _ = jnp.split(joined, 3, axis=1)
    return jnp.pad(middle, ((1, 0), (0, 0)))[1:] + end * first + jnp.tile(second, (2, 1))[:2]


def indexed(h):
    rows = h[jnp.array([1, 0])]
    updated = lax.dynamic_update_slice(rows, h[:1] * 2, (1, 0))
    return updated + lax.dynamic_slice(h, (1, 0), (1, 6)) + h.at[0].add(h[1])


def scattered(h):
    """Rows of channels at indices, in each way."""
    rows, other = jnp.array([1, 0]), jnp.sin(h) * 3
    window = h.at[rows]
    less = window.subtract if hasattr(window, 'subtract') else window.add  # as JAX 0.5
    combined = (less, window.max, window.min, window.add, window.set)
    product = window.multiply(other, unique_indices=True)
    return product + sum(combine(other) for combine in combined)


def every_second(h):
    """Pairs of channels, of which the first are taken."""
    pairs = jnp.stack([h, jnp.sin(h)], axis=2).reshape(2, 12)
    return pairs[:, ::2] * pairs[:, 1::2]


PROGRAMS = {
    'scan': with_states,
    'while': loop,
    'cond': lambda h: lax.cond(jnp.sum(h) > 0, jnp.sin, lambda h: h * TABLE, h),
    'partly used': partly_used,
    'from nothing': lambda h: h * jnp.arange(6.0) + h * jax.random.normal(KEY, (2, 6)),
    'from a folded key': lambda h: h * jax.random.normal(jax.random.fold_in(KEY, 1), (2, 6)),
    'parts': parts,
    'indices': indexed,
    'scatters': scattered,
    'strides': every_second,
    'remat': jax.checkpoint(lambda h: jnp.sin(jnp.sin(h))),
    'jit': jax.jit(lambda h: jnp.sin(h) * TABLE),
    'custom_vjp': doubled_gradient,
    'operand of a rule': lambda h: scaled_gradient(h, jnp.tanh(h.shape[0] * jnp.ones(()))),
    'custom_jvp': clipped,
}


def make(function):
    def model(p, x):
        return function(x @ p['up']) @ p['down']

    params = {'up': RNG.normal(size=(3, 6)), 'down': RNG.normal(size=(6, 2))}
    x = RNG.normal(size=(2, 3))
    return model, *in_doubles(jax.tree.map(jnp.asarray, (params, x)))


def gradient(function, params, x):
    return jax.grad(lambda params: jnp.sum(jnp.sin(function(params, x))))(params)


def assert_equal_to_zeroed(model, params, x, keep, has_gradient=True):
    """The small model has the values and the gradients of the zeroed one; returns the graph."""
    graph = channel_groups(model, params, x)
    verification = graph.verify(params, keep, x)
    assert verification.relative_error < 1e-12
    assert verification.verdict == 'equal'
    if has_gradient:
        expected = graph.shrink(gradient(model, graph.zeroed(params, keep), x), keep)
        found = gradient(graph.small_apply(keep), graph.shrink(params, keep), x)
        jax.tree.map(np.testing.assert_allclose, found, expected)
    return graph


@pytest.mark.parametrize('function', PROGRAMS.values(), ids=PROGRAMS)
def test_programs_at_smaller_shapes_are_the_zeroed_ones(function):
    with doubles():
        model, params, x = make(function)
        # Older JAX names the group after another member.
        (group,) = channel_groups(model, params, x).groups
        assert_equal_to_zeroed(model, params, x, {group: KEEP['up[1]']}, function is not loop)


def test_a_rule_that_cannot_be_followed_is_an_error_when_a_derivative_is_taken():
    with doubles():
        model, params, x = make(sorted_rule)
        graph = channel_groups(model, params, x)
        small_apply, small = graph.small_apply(KEEP), graph.shrink(params, KEEP)
        assert graph.verify(params, KEEP, x).verdict == 'equal'
        with pytest.raises(ValueError, match=r'custom_jvp_call: .*axis of 6 .sort.*test_replay.*;'):
            gradient(small_apply, small, x)


def test_policies_of_remat_are_kept():
    policy = jax.checkpoint_policies.nothing_saveable
    with doubles():
        model, params, x = make(jax.checkpoint(jnp.sin, policy=policy))
        graph = channel_groups(model, params, x)
        program = jax.make_jaxpr(graph.small_apply(KEEP))(graph.shrink(params, KEEP), x)
    (remat,) = [e for e in program.jaxpr.eqns if 'policy' in e.params]
    assert remat.params['policy'] is policy


def test_what_nothing_is_known_of_stays_whole():
    def function(h):
        part = h[:, :4]
        return jax.pure_callback(np.sin, part, part) @ jnp.ones((4, 6)) + jnp.sin(h)

    with doubles():
        model, params, x = make(function)
        graph = channel_groups(model, params, x)
        (group,) = graph.groups.values()
        assert group.size == 2
        assert graph.verify(params, {group.name: [1]}, x).verdict == 'equal'


@pytest.mark.parametrize('reverse', [False, True])
def test_layers_of_a_scan_keep_their_own_part_of_what_is_made_there(reverse):
    """What the program makes in each trip is cut by the list of its layer."""

    def layer(x, p):
        return x + (clipped(x @ p['up']) * (1 + jnp.arange(6.0))) @ p['down']

    def model(p, x):
        return scan(layer, x, p, reverse=reverse)

    with doubles():
        shapes = {'up': (3, 2, 6), 'down': (3, 6, 2)}
        params = {name: jnp.asarray(RNG.normal(size=shape)) for name, shape in shapes.items()}
        keep = {'up[2]': [[0, 2, 3], [1, 2, 5], [0, 3, 4]]}
        graph = assert_equal_to_zeroed(model, params, jnp.asarray(RNG.normal(size=(4, 2))), keep)
        small = graph.shrink(params, keep)
        np.testing.assert_array_equal(small['down'][1], params['down'][1, [1, 2, 5]])
