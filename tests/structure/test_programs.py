"""Several programs of the same parameters, cut by one plan."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.structure import channel_groups
from structure import stateful
from structure.doubles import close, doubles, in_doubles
from uses.table import floats, scan


def check(graph, params, calls, keep):
    """Each program, with its states and inputs, does in the small model what it does in the zeroed one."""
    small_params, zeroed_params = graph.shrink(params, keep), graph.zeroed(params, keep)
    for apply_fn, states, inputs in calls:
        small_states = [graph.shrink(state, keep) for state in states]
        zeroed_states = [graph.zeroed(state, keep) for state in states]
        found = graph.small_apply(keep, of=apply_fn)(small_params, *small_states, *inputs)
        expected = apply_fn(zeroed_params, *zeroed_states, *inputs)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        close(jax.tree.leaves(found)[0], jax.tree.leaves(expected)[0])


def test_training_and_evaluation_are_cut_by_one_plan():
    with doubles():
        apply_fns, params, state, inputs = stateful.linen_programs()
        params, state, inputs = in_doubles((params, state, inputs))
        train, evaluate = apply_fns
        graph = channel_groups(train, params, *inputs, state=state)
        graph = graph.also(evaluate, *inputs, state=state)
        (group,) = graph.groups.values()
        assert (group.name, len(group.in_state)) == ('Conv_0/kernel[3]', 2)
        keep = {group.name: [0, 2, 3]}
        others = (jnp.ones((5, 6, 4, 3)),)
        calls = [(train, [state], inputs), (evaluate, [state], inputs), (evaluate, [state], others)]
        check(graph, params, calls, keep)
        verification = graph.verify(params, keep, *inputs, state=state, of=evaluate)
        assert verification.verdict == 'equal'


SHAPES = {'up': floats(3, 8), 'other': floats(3, 8), 'mid': floats(8, 8), 'down': floats(8, 2)}


def first(p, x):
    return jnp.tanh(x @ p['up'] + x @ p['other']) @ p['mid'] @ p['down']


ALONE = channel_groups(first, SHAPES, floats(5, 3))


def test_what_another_program_pins_stays_and_its_name_is_told():
    def features(p, x):
        return x @ p['up']

    both = ALONE.also(features, floats(5, 3))
    assert (list(ALONE.groups), list(both.groups)) == (['up[1]', 'mid[1]'], ['mid[1]'])
    assert 'axis 1 of result 0 of features' in both.explain('other', 1)


def test_what_is_not_exact_in_another_program_is_not_exact():
    both = ALONE.also(lambda p, x: jax.nn.softmax(x @ p['up']) @ p['mid'] @ p['down'], floats(5, 3))
    exact = [graph.groups[name].exact for graph in (ALONE, both) for name in ('up[1]', 'mid[1]')]
    assert exact == [True, True, False, True]
    assert 'test_programs.py' in both.groups['up[1]'].reason


def test_lists_of_layers_need_programs_that_keep_layers_apart():
    """A program that reads one layer of a scan's by its number does not know of other layers."""

    def scanned(p, x):
        return scan(lambda x, p: x + jnp.tanh(x @ p['up']) @ p['down'], x, p)

    def mean_of_layers(p, x):
        return jnp.tanh(x @ p['up'].mean(0)) @ p['down'].mean(0)

    shapes = {'up': floats(3, 4, 6), 'down': floats(3, 6, 4)}
    alone = channel_groups(scanned, shapes, floats(5, 4))
    both = alone.also(mean_of_layers, floats(5, 4))
    assert [owner.size for owner in alone.groups['up[2]'].lists] == [3]
    assert both.groups['up[2]'].lists == ()


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
    with pytest.raises(ValueError, match='has the program first already'):
        ALONE.also(first, floats(5, 3))
    with pytest.raises(ValueError, match=r'made of first, not of .*tanh.*; add it with graph.also'):
        ALONE.small_apply({}, of=jnp.tanh)
