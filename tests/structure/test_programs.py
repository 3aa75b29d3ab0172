"""Several programs of the same parameters, cut by one plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner.structure import channel_groups
from structure import stateful
from structure.doubles import doubles, in_doubles, keep_of
from uses.table import floats


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def check(graph, params, calls, keep):
    """Each program of the small model does what it does in the zeroed one.

    Args:
      graph: of the programs.
      params: of the whole model.
      calls: for each program the function, the state or `None`, and the inputs.
      keep: what stays.
    """
    small_params = graph.shrink(params, keep)
    for apply_fn, state, inputs in calls:
        verification = graph.verify(params, keep, *inputs, state=state, of=apply_fn)
        assert verification.verdict == 'equal'
        assert verification.relative_error < 1e-9
        states = () if state is None else (graph.zeroed(state, keep),)
        expected = apply_fn(graph.zeroed(params, keep), *states, *inputs)
        states = () if state is None else (graph.shrink(state, keep),)
        found = graph.small_apply(keep, of=apply_fn)(small_params, *states, *inputs)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        close(jax.tree.leaves(found)[0], jax.tree.leaves(expected)[0])


def test_training_and_evaluation_are_cut_by_one_plan():
    with doubles():
        apply_fns, params, state, inputs = stateful.linen_programs()
        params, state, inputs = in_doubles((params, state, inputs))
        train, evaluate = apply_fns
        graph = channel_groups(train, params, *inputs, state=state)
        graph = graph.also(evaluate, *inputs, state=state)
        (name,) = graph.groups
        assert name == 'Conv_0/kernel[3]'
        assert len(graph.groups[name].in_state) == 2
        keep = {name: [0, 2, 3]}
        check(graph, params, [(train, state, inputs), (evaluate, state, inputs)], keep)
        other = jnp.ones((5, 6, 4, 3))
        small, small_state = graph.shrink(params, keep), graph.shrink(state, keep)
        logits = graph.small_apply(keep, of=evaluate)(small, small_state, other)
        zeroed = graph.zeroed(params, keep), graph.zeroed(state, keep)
        close(logits, evaluate(*zeroed, other))


def attend(params, x):
    """All tokens at once, as in training, without a cache."""
    query = jnp.einsum('btd,dkgh->btkgh', x, params['query'])
    key, value = (jnp.einsum('btd,dkh->btkh', x, params[name]) for name in ('key', 'value'))
    scores = jnp.einsum('bskgh,btkh->bkgst', query, key)
    scores = jnp.where(jnp.tril(jnp.ones((7, 7), bool)), scores, -1e9)
    mixed = jnp.einsum('bkgst,btkh->bskgh', jax.nn.softmax(scores), value)
    return jnp.einsum('bskgh,kghd->bsd', mixed, params['out'])


def test_decoding_with_a_cache_follows_training():
    """What the small decoder computes token by token is what the small model computes at once."""
    with doubles():
        decode, params, state, _ = stateful.cache()
        params, state = in_doubles((params, state))
        tokens = jnp.asarray(stateful.RNG.normal(size=(2, 7, 5)))
        graph = channel_groups(attend, params, tokens)
        graph = graph.also(decode, tokens[:, 0], state=state)
        assert list(graph.groups) == ['query[3]', 'query[2]', 'query[1]', 'value[2]']
        rng = np.random.default_rng(0)
        keep = {name: keep_of(group, 0.5, rng) for name, group in graph.groups.items()}
        check(graph, params, [(attend, None, (tokens,)), (decode, state, (tokens[:, 0],))], keep)

        small = graph.shrink(params, keep)
        empty = jax.tree.map(jnp.zeros_like, graph.shrink(state, keep))
        small_decode = graph.small_apply(keep, of=decode)
        rows = []
        for token in range(7):
            row, empty = small_decode(small, empty, tokens[:, token])
            rows.append(row)
        close(jnp.stack(rows, 1), graph.small_apply(keep)(small, tokens))


SHAPES = {'up': floats(3, 8), 'other': floats(3, 8), 'mid': floats(8, 8), 'down': floats(8, 2)}


def first(p, x):
    return jnp.tanh(x @ p['up'] + x @ p['other']) @ p['mid'] @ p['down']


def graphs(function, *inputs, **shapes):
    """The graph of `first` alone and with another program."""
    alone = channel_groups(first, {**SHAPES, **shapes}, floats(5, 3))
    return alone, alone.also(function, *(inputs or (floats(5, 3),)))


def test_what_another_program_pins_stays_and_its_name_is_told():
    def features(p, x):
        return x @ p['up']

    alone, both = graphs(features)
    assert list(alone.groups) == ['up[1]', 'mid[1]']
    assert list(both.groups) == ['mid[1]']
    assert 'axis 1 of result 0 of features' in both.explain('other', 1)


def test_what_is_not_exact_in_another_program_is_not_exact():
    alone, both = graphs(lambda p, x: jax.nn.softmax(x @ p['up']) @ p['mid'] @ p['down'])
    assert alone.groups['up[1]'].exact
    assert not both.groups['up[1]'].exact
    assert 'test_programs.py' in both.groups['up[1]'].reason
    assert both.groups['mid[1]'].exact


def test_lists_of_layers_need_programs_that_keep_layers_apart():
    """A program that reads one layer of a scan's by its number does not know of other layers."""

    def scanned(p, x):
        return lax.scan(lambda x, p: (x + jnp.tanh(x @ p['up']) @ p['down'], None), x, p)[0]

    def mean_of_layers(p, x):
        return jnp.tanh(x @ p['up'].mean(0)) @ p['down'].mean(0)

    shapes = {'up': floats(3, 4, 6), 'down': floats(3, 6, 4)}
    alone = channel_groups(scanned, shapes, floats(5, 4))
    both = alone.also(mean_of_layers, floats(5, 4))
    assert [owner.size for owner in alone.groups['up[2]'].lists] == [3]
    assert both.groups['up[2]'].lists == ()
    assert alone.groups['up[0]'].exact


def test_a_state_that_one_program_fills_is_not_zero_in_the_other():
    """Each program by itself would allow the cut."""

    def count(p, state, x):
        hidden = x @ p['up'] + state['s']
        return hidden @ p['down'], {'s': state['s'] + 1}

    def measure(p, state, x):
        hidden = x @ p['up'] + state['s']
        return hidden @ p['down'] * jnp.sum(hidden * hidden)

    shapes = {'up': floats(3, 8), 'down': floats(8, 2)}
    state = {'s': floats(8)}
    counting = channel_groups(count, shapes, floats(5, 3), state=state)
    measuring = channel_groups(measure, shapes, floats(5, 3), state=state)
    both = counting.also(measure, floats(5, 3), state=state)
    exact = [graph.groups['up[1]'].exact for graph in (counting, measuring, both)]
    assert exact == [True, True, False]


def test_programs_that_do_not_fit_are_refused():
    graph = channel_groups(first, SHAPES, floats(5, 3))
    with pytest.raises(ValueError, match='has the program first already'):
        graph.also(first, floats(5, 3))
    with pytest.raises(ValueError, match=r'made of first, not of .*tanh.*; add it with graph.also'):
        graph.small_apply({}, of=jnp.tanh)

    def with_state(p, state, x):
        return first(p, x) + state['s'].sum()

    def with_another(p, state, x):
        return with_state(p, state, x)

    graph = graph.also(with_state, floats(5, 3), state={'s': floats(3)})
    with pytest.raises(ValueError, match=r's of the state has shape \(3,\) .* \(3, 2\) in another'):
        graph.also(with_another, floats(5, 3), state={'s': floats(3, 2)})
