"""States are cut along: what a small model returns is the state of its next call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups
from structure import stateful
from structure.doubles import close, doubles, in_doubles, keep_of


@pytest.mark.parametrize('row', stateful.MODELS.values(), ids=stateful.MODELS)
def test_two_calls_of_the_small_model_are_those_of_the_zeroed_one(row):
    with doubles():
        apply_fn, *arrays = row.make()
        params, state, inputs = in_doubles(tuple(arrays))
        graph = channel_groups(apply_fn, params, *inputs, state=state)
        rng = np.random.default_rng(1)
        keep = {name: keep_of(group, 0.5, rng) for name, group in graph.groups.items()}
        whole = graph.zeroed(params, keep), graph.zeroed(state, keep)
        small = graph.shrink(params, keep, verify=False), graph.shrink(state, keep)
        for _ in range(2):
            expected, found = apply_fn(*whole, *inputs), graph.small_apply(keep)(*small, *inputs)
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            close(found[1 - row.state_at], expected[1 - row.state_at])
            whole = whole[0], next_state(whole[1], expected[row.state_at])
            small = small[0], next_state(small[1], found[row.state_at])
            jax.tree.map(close, small[1], graph.shrink(whole[1], keep))


def next_state(before, returned):
    """What did not come back stays."""
    return {**before, **returned} if isinstance(before, dict) else returned


def test_caches_of_other_batches_are_cut_and_used():
    apply_fn, params, state, (x,) = stateful.cache()
    graph = channel_groups(apply_fn, params, x, state=state)
    keep = {'query[3]': [0, 2], 'query[1]': [1]}
    cache = {'cache': jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim else leaf, state['cache'])}
    small = graph.shrink(cache, keep)
    assert small['cache']['key'].shape == (1, 7, 1, 2)
    _, after = graph.small_apply(keep)(graph.shrink(params, keep, verify=False), small, x[:1])
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, small)
    with pytest.raises(ValueError, match=r'cache/key has shape \(2, 7, 2, 3\), .*\(2, 7, 2, 4\)'):
        graph.shrink({'cache': {'key': state['cache']['key'][..., :3]}}, keep)


PARAMS, X = {'up': jnp.ones((3, 6)), 'down': jnp.ones((6, 2))}, jnp.ones((2, 3))


def make(function):
    """A model of hidden channels `h` and a state `s` of their shape: a function of both returns the two."""

    def apply(p, state, x):
        h, s = function(x @ p['up'], state['s'])
        return h @ p['down'], {'s': s}

    return channel_groups(apply, PARAMS, X, state={'s': jnp.ones((2, 6))})


def norm_of(s):
    return jnp.sum(s * s, -1, keepdims=True)


# Whether zeros of the state stay zeros from call to call.
HOSTILE = {
    'sum of hidden units': (lambda h, s: (h * norm_of(s + h), s + h), True),
    'count': (lambda h, s: (h * norm_of(s + h), s + 1), False),
    'count of calls before': (lambda h, s: (h * norm_of(s + h), jnp.cos(s)), False),
    'count of which no sum is taken': (lambda h, s: (h * s, s + 1), True),
    'infinite in the second call': (lambda h, s: (h * s, 1 / s), False),
    'state that is not read': (lambda h, s: (h, h), True),
}


@pytest.mark.parametrize(('function', 'exact'), HOSTILE.values(), ids=HOSTILE)
def test_zeros_of_a_state_are_followed_from_call_to_call(function, exact):
    assert make(function).groups['up[1]'].exact == exact


def test_a_state_that_comes_back_in_another_shape_stays():
    graph = make(lambda h, s: (h + s, jnp.concatenate([s, h])))
    assert 'axis 1 of result 1 of the model' in graph.explain('up', 1)


def test_entries_of_a_state_come_back_by_name():
    def apply(p, state, x):
        h = x @ p['up'] + state['a']
        return {'loss': h @ p['down'], 'extra': {'a': state['a'] + h, 'b': 0.0}}

    state = {'a': jnp.ones((2, 6)), 'c': jnp.ones(3)}
    graph = channel_groups(apply, PARAMS, X, state=state)
    assert list(graph.groups) == ['up[1]']


def test_what_could_be_the_state_twice_is_refused():
    def apply(p, state, x):
        state = jnp.tanh(x @ p['up'] + state)
        return state, state

    with pytest.raises(ValueError, match=r'0 and 1 of the results .* state=\{"cache": state\}'):
        channel_groups(apply, PARAMS, X, state=jnp.ones((2, 6)))


def test_states_that_do_not_fit_are_refused():
    graph = make(lambda h, s: (h + s, s + h))
    keep = {'up[1]': [0, 1]}
    small_apply, small = graph.small_apply(keep), graph.shrink(PARAMS, keep)
    with pytest.raises(TypeError, match='takes a state after the parameters'):
        small_apply(small)
    with pytest.raises(ValueError, match='the state has another structure'):
        small_apply(small, {'t': jnp.ones((2, 2))}, X)
    with pytest.raises(ValueError, match=r's has shape \(2, 6\), where .*\(2, 2\)'):
        small_apply(small, {'s': jnp.ones((2, 6))}, X)
    with pytest.raises(TypeError, match='give state='):
        graph.verify(PARAMS, keep, X)
    with pytest.raises(ValueError, match=r'up is the path of .*state=\{"state": state\}'):
        channel_groups(lambda p, s, x: x, PARAMS, X, state={'up': jnp.ones(3)})
