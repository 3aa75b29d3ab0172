"""What runs at most once: its results, and what its loop has to do with."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import compiling
from jaxpruner.core import control

newest_xla = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason='what XLA does with it was seen on JAX 0.10'
)
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


def in_loop(function):
    """A program that runs a function once, in a loop, when it is due."""

    def program(when, total, value):
        def body(carry):
            pending, current, read = control.keep_in_loop((*carry, value))
            return jnp.zeros_like(pending), current + function(read)

        return jax.lax.while_loop(lambda carry: carry[0], body, (when, total))[1]

    return program


def body_of_loop(function, value):
    arguments = jnp.bool_(True), jnp.zeros(8), value
    program = jax.make_jaxpr(in_loop(function))(*arguments).jaxpr
    (loop,) = (equation for equation in program.eqns if equation.primitive.name == 'while')
    return loop.params['body_jaxpr'].jaxpr


def test_what_a_loop_keeps_is_read_behind_a_barrier():
    value = jnp.arange(8.0)
    barrier, *others = body_of_loop(jnp.exp, value).eqns
    assert barrier.primitive.name == 'optimization_barrier'
    read = {variable for equation in others for variable in equation.invars}
    assert not read & set(barrier.invars)
    assert jax.jit(in_loop(jnp.exp))(True, jnp.zeros(8), value).tolist() == jnp.exp(value).tolist()


def draw(key):
    return jax.random.uniform(key, (8,))


@pytest.mark.parametrize('run', [control.draw_in_loop, control.compute_apart])
def test_a_branch_holds_the_drawing_of_random_numbers(run):
    key = jax.random.key(0)
    program = jax.make_jaxpr(lambda key: run(draw, key))(key).jaxpr
    assert [equation.primitive.name for equation in program.eqns][-1] == 'cond'
    np.testing.assert_array_equal(jax.jit(lambda key: run(draw, key))(key), draw(key))


def test_a_branch_is_still_there_when_the_program_is_compiled():
    def program(values):
        exponentials = control.compute_apart(jnp.exp, values)
        return exponentials[:4] + exponentials[4:], jnp.sum(exponentials)

    text = jax.jit(program).lower(jnp.arange(8.0)).compile(compiling.AS_USERS).as_text()
    assert ' conditional(' in text


def test_an_update_is_rounded_before_it_is_added():
    factor, gradient, param = jax.random.normal(jax.random.key(0), (3, 1000))
    param = param.at[0].set(jnp.nan)

    def step(factor, gradient, param):
        return param + control.round_before_adding(factor * gradient, param)

    got = jax.jit(step, compiler_options=compiling.AS_USERS)(factor, gradient, param)
    product = np.asarray(factor) * np.asarray(gradient)
    np.testing.assert_array_equal(got, np.asarray(param) + product)


def test_updates_of_whole_numbers_are_left_as_they_are():
    update = jnp.array([1, 2])
    assert control.round_before_adding(update, jnp.array([jnp.nan, 1.0])) is update


@newest_xla
@pytest.mark.parametrize('hides', [False, True])
def test_programs_that_differ_by_a_hidden_constant_are_equal(hides):
    def columns(table):
        indices = [np.int32(0), np.int32(2)]
        if hides:
            indices = control.hide_constants(indices, table)
        return [table * lax.dynamic_index_in_dim(table, i, 1) for i in indices]

    table = jnp.arange(12.0).reshape(4, 3)
    compiled = jax.jit(columns).lower(table).compile()
    np.testing.assert_array_equal(compiled(table)[1], table * table[:, 2:])
    # A constant index makes a slice of its own, or is written into the program.
    text = compiled.as_text()
    assert (len(re.findall(r'dynamic-slice\(', text)) > 0) == hides


@newest_xla
@pytest.mark.parametrize('is_whole', [False, True])
def test_a_sum_of_what_was_joined_is_no_chain(is_whole):
    def total(parts):
        joined = jnp.concatenate([part[None] for part in parts])
        return jnp.sum(control.keep_whole(joined) if is_whole else joined, 0)

    parts = [jnp.full(3, i, jnp.uint32) for i in range(20)]
    compiled = jax.jit(total).lower(parts).compile()
    np.testing.assert_array_equal(compiled(parts), [190] * 3)
    additions = re.findall(r' add\(', compiled.as_text())
    assert (len(additions) < 5) == is_whole


@pytest.mark.parametrize(
    ('values', 'expected'), [([[3.0, -4.0]], 25), ([[0.0], [0.0]], 0), ([], 0), (2.0, 4)]
)
def test_squares_are_summed(values, expected):
    assert float(control.sum_squares_in_passing(jnp.array(values, jnp.float32))) == expected


def test_squares_that_are_summed_in_passing_take_no_memory():
    def norm(values):
        finite = jnp.where(jnp.isfinite(values), values, 0)
        return control.sum_squares_in_passing(finite)

    values = jnp.ones((512, 512))
    lowered = jax.jit(norm).lower(values)
    assert compiling.as_written(lowered).memory_analysis().temp_size_in_bytes < values.nbytes / 10


def test_what_is_compiled_when_eager_stands_in_a_program_as_it_is_written():
    double_and_add = control.jit_when_eager(lambda x, y: x * 2 + y)
    x, y = jnp.float32(3), jnp.float32(1)
    with compiling.Programs() as programs:
        assert float(double_and_add(x, y)) == 7
    assert programs.number == 1
    names = [equation.primitive.name for equation in jax.make_jaxpr(double_and_add)(x, y).eqns]
    assert names == ['mul', 'add']
    assert jax.vmap(double_and_add, (0, None))(jnp.arange(2.0), y).tolist() == [1, 3]
