"""What runs at most once: its results, and what its loop has to do with."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.core import control

STATE = {'changed': jnp.float32(1), 'kept': jnp.float32(2), 'read': jnp.float32(3)}
INPUTS = jnp.float32(10), jnp.float32(20)


def add(state, first, second):
    del second
    return {**state, 'changed': state['changed'] + state['read'] + first}


def loop_of(narrow):
    """The operands of the loop by their place among state and inputs: those it carries, and those it reads."""
    program = jax.make_jaxpr(
        lambda when, state, inputs: control.run_once(when, add, state, *inputs, narrow=narrow)
    )(True, STATE, INPUTS).jaxpr
    (loop,) = (equation for equation in program.eqns if equation.primitive.name == 'while')
    names = dict(zip(program.invars, ['when', *STATE, 'first', 'second'], strict=True))
    constants = loop.params['cond_nconsts'] + loop.params['body_nconsts']
    read, carried = loop.invars[:constants], loop.invars[constants:]
    return [names[variable] for variable in carried], [names[variable] for variable in read]


@pytest.mark.parametrize('narrow', [False, True])
@pytest.mark.parametrize('due', [False, True])
@pytest.mark.parametrize('run', [lambda function: function, jax.jit], ids=['eager', 'jit'])
def test_it_runs_once_if_it_is_due(narrow, due, run):
    got = run(lambda when: control.run_once(when, add, STATE, *INPUTS, narrow=narrow))(due)
    assert {name: float(value) for name, value in got.items()} == {
        'changed': 14 if due else 1,
        'kept': 2,
        'read': 3,
    }


@pytest.mark.parametrize('narrow', [False, True])
def test_under_vmap_each_has_its_own_turn(narrow):
    got = jax.vmap(
        lambda when: control.run_once(when, add, STATE, *INPUTS, narrow=narrow)['changed']
    )(jnp.array([False, True]))
    assert got.tolist() == [1, 14]


def test_a_loop_carries_and_reads_all_that_it_is_given():
    assert loop_of(narrow=False) == (['when', 'changed', 'kept', 'read'], ['first', 'second'])


def test_a_narrow_loop_has_to_do_with_what_changes_and_what_is_read():
    assert loop_of(narrow=True) == (['when', 'changed'], ['read', 'first'])


@pytest.mark.parametrize('narrow', [False, True])
def test_dtypes_of_the_state_are_kept(narrow):
    def wider(state):
        return state.astype(jnp.float32) * 2

    got = jax.jit(lambda when: control.run_once(when, wider, jnp.bfloat16(3), narrow=narrow))(True)
    assert got.dtype == jnp.bfloat16
    assert float(got) == 6


def test_a_narrow_loop_that_changes_nothing_returns_the_state():
    got = jax.jit(lambda when: control.run_once(when, lambda state: state, STATE, narrow=True))(
        True
    )
    assert got == STATE
