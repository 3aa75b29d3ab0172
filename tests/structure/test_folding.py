"""Numbers of old widths that parameters take up: the module of the new widths then gives the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner.structure import channel_groups
from structure import widths
from structure.doubles import doubles, in_doubles
from structure.values import values_like
from uses.table import floats

X = floats(4, 5, 3)


def halves(graph):
    return {name: np.arange(group.size // 2) for name, group in graph.groups.items()}


def rms_norm(x, scale, eps=1e-3):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps) * scale


def layer_norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-3) * scale


def attention(p, h):
    query, key, value = (jnp.einsum('...d,dhk->...hk', h, p[name]) for name in ('q', 'k', 'v'))
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key) / query.shape[-1] ** 0.5
    mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(logits), value)
    return jnp.einsum('...hk,hkd->...d', mixed, p['o'])


PARAMS = {
    'embed': floats(3, 8),
    'norm': floats(8),
    'q': floats(8, 2, 4),
    'k': floats(8, 2, 4),
    'v': floats(8, 2, 4),
    'o': floats(2, 4, 8),
    'head': floats(8, 2),
}


def block(norm, **settings):
    def apply(p, x):
        x = x @ p['embed']
        return jnp.tanh((x + attention(p, norm(x, p['norm'], **settings))) @ p['head'])

    return apply


def scanned(p, x):
    def layer(x, p):
        return x + jnp.tanh(rms_norm(x, p['norm']) @ p['up']) @ p['down'], None

    x, _ = lax.scan(layer, x @ p['embed'], p['layers'])
    return jnp.sin(rms_norm(x, p['last']) @ p['head'])


LAYERS = {'norm': floats(3, 8), 'up': floats(3, 8, 6), 'down': floats(3, 6, 8)}
SCANNED = {'embed': floats(3, 8), 'layers': LAYERS, 'last': floats(8), 'head': floats(8, 2)}


def branches(p, x):
    h = x @ p['embed']
    h = lax.cond(x.sum() > 0, lambda h: h / h.shape[-1], lambda h: -h / h.shape[-1], h)
    return jax.nn.relu(h) @ p['head']


def looped(p, x):
    h = lax.fori_loop(0, 2, lambda _, h: h - 0.1 * h, (x @ p['embed']) / p['embed'].shape[1])
    return jnp.tanh(h @ p['head'])


def rounded(p, x):
    h = jnp.int32(10 * (x @ p['embed'])).astype(x.dtype)
    return jnp.tanh((h / h.shape[-1]) @ p['head'])


SMALL = {'embed': floats(3, 8), 'head': floats(8, 2)}

# Function, shapes, factors, whether epsilons are left; the last with epsilons as they are.
CASES = {
    'attention': (
        block(rms_norm),
        PARAMS,
        {'norm': 2**0.5, 'q': 0.5**0.5},
        True,
    ),
    'scan': (scanned, SCANNED, {'layers/norm': 2**0.5, 'last': 2**0.5}, True),
    'rounded': (rounded, SMALL, {'head': 0.5}, False),
    'branches': (branches, SMALL, {'embed': 0.5}, False),
    'loop': (looped, SMALL, {'embed': 0.5}, False),
}


def analysed(function, shapes, allow_inexact=False):
    params, (x,) = in_doubles(values_like(shapes, (X,)))
    graph = channel_groups(function, params, x)
    keep = halves(graph)
    small = graph.shrink(params, keep, allow_inexact, verify=False)
    return graph, keep, params, small, x


@pytest.mark.parametrize(
    ('function', 'shapes', 'factors', 'has_epsilon'), CASES.values(), ids=CASES
)
def test_parameters_take_up_what_they_can(function, shapes, factors, has_epsilon):
    with doubles():
        graph, keep, params, small, x = analysed(function, shapes)
        assert graph.compare(params, keep, function, x).verdict == 'different'
        folded = graph.fold(small, keep, function)
        assert folded.factors == pytest.approx(factors)
        assert not folded.left
        assert folded.is_complete == (not has_epsilon)
        for constant in folded.constants:
            assert constant.new == pytest.approx(2 * constant.old)
            assert 'constants that the module has to get' in str(folded)
        exact = graph.fold(small, keep, function, weights_only=True)
        assert exact.is_complete
        found = graph.compare(params, keep, function, x, folded=exact)
        assert found.verdict == 'equal'
        assert found.verification.relative_error < 1e-8


def test_another_epsilon_makes_the_module_equal():
    with doubles():
        graph, keep, params, small, x = analysed(block(rms_norm), PARAMS)
        right = block(rms_norm, eps=2e-3)
        folded = graph.fold(small, keep, right)
        assert folded.is_complete
        found = graph.compare(params, keep, right, x, folded=folded)
        assert found.verdict == 'equal'
        assert found.verification.relative_error < 1e-8
        # With the old one it is close, and the epsilon is named.
        other = block(rms_norm)
        found = graph.compare(params, keep, other, x, folded=graph.fold(small, keep, other))
        assert found.verdict == 'different'
        assert '0.001' in str(found)


def test_the_mean_of_a_layer_norm_is_named_and_attention_is_folded_all_the_same():
    with doubles():
        graph, keep, params, small, x = analysed(block(layer_norm), PARAMS, allow_inexact=True)
        folded = graph.fold(small, keep, block(layer_norm), allow_inexact=True)
        assert {float(number.old) for number in folded.left} == {8.0}
        assert folded.factors == pytest.approx({'norm': 2**0.5, 'q': 0.5**0.5})
        assert 'numbers that no parameter takes up' in str(folded)
        found = graph.compare(params, keep, block(layer_norm), x, folded=folded, allow_inexact=True)
        assert found.verdict == 'different'
        assert found.numbers == folded.constants + folded.left


@pytest.mark.parametrize('library', ['linen', 'nnx'])
def test_modules_of_libraries_are_folded(library):
    build, arguments, smaller = widths.LIBRARIES[library]
    apply_fn, shapes = build(**arguments)
    params, _ = values_like(shapes, ())
    graph = channel_groups(apply_fn, params, widths.X)
    keep = halves(graph)
    small_fn, _ = build(**smaller)
    folded = graph.fold(graph.shrink(params, keep, verify=False), keep, small_fn, weights_only=True)
    assert folded.is_complete
    found = graph.compare(params, keep, small_fn, widths.X, folded=folded)
    assert found.verdict == 'equal'


def test_equal_results_of_another_program_are_unproven():
    with doubles():
        graph, keep, params, small, x = analysed(
            lambda p, x: jnp.tanh(x @ p['embed']) @ p['head'], SMALL
        )

        def other(p, x):
            return (jnp.tanh(x @ p['embed']) * 1.0) @ p['head']

        found = graph.compare(params, keep, other, x)
        assert found.verdict == 'unproven'
        assert 'mul' in found.other_difference
        assert 'the results are equal for these inputs' in str(found)
        with pytest.raises(
            ValueError, match=r'another program: it has dot_general in place of mul'
        ):
            graph.fold(small, keep, other)
