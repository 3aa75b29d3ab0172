"""Warnings point at the line of whoever called, through all that stands between."""

import dataclasses
import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions
from jaxpruner.core import caller_warnings

# As scan stacks them: the default filter takes biases of stacked layers for kernels, and says so.
STACKED = {'layer': {'bias': jnp.ones((2, 3)), 'kernel': jnp.ones((2, 3, 3))}}


def pruner():
    return jaxpruner.MagnitudePruning(sparsity_distribution_fn=half)


def half(params):
    del params
    caller_warnings.warn('half of something')
    return {'layer': {'bias': None, 'kernel': 0.5}}


@dataclasses.dataclass
class WarnsWhenMade:
    value: int

    def __post_init__(self):
        caller_warnings.warn('made')


# A constructor that stands in the package, as far as its globals say.
exec_globals = {'__name__': 'jaxpruner.made_up', 'caller_warnings': caller_warnings}
exec(
    'def warn_from_inside(_=None):\n    caller_warnings.warn("from inside")\n    return _',
    exec_globals,
)
warn_from_inside = exec_globals['warn_from_inside']

CALLS = {
    'directly': lambda: warn_from_inside(),
    'a distribution': lambda: sparsity_distributions.uniform(STACKED, 0.5),
    'through jit': lambda: jax.jit(warn_from_inside)(1.0),
    'through vmap and grad': lambda: jax.vmap(jax.grad(warn_from_inside))(jnp.ones(2)),
    'through lax.map': lambda: jax.lax.map(warn_from_inside, jnp.ones(2)),
    'through eval_shape': lambda: jax.eval_shape(warn_from_inside, jnp.ones(3)),
    'through optax.chain': lambda: optax.chain(
        optax.GradientTransformation(warn_from_inside, lambda *args: args), optax.sgd(0.1)
    ).init(1.0),
}


@pytest.mark.parametrize('call', CALLS.values(), ids=list(CALLS))
def test_the_warning_points_at_the_line_of_the_call(call):
    with pytest.warns(UserWarning, match='inside|bias or norm') as caught:
        call()
    lines, start = inspect.getsourcelines(call)
    assert [warning.filename for warning in caught] == [__file__]
    # A lambda's source is the whole statement in which it stands.
    assert start <= caught[0].lineno < start + len(lines)


def test_what_a_users_own_function_warns_of_points_into_that_function():
    with pytest.warns(UserWarning, match='half of something') as caught:
        pruner().get_target_sparsities(STACKED)
    lines, start = inspect.getsourcelines(half)
    assert caught[0].filename == __file__
    assert start <= caught[0].lineno < start + len(lines)


def test_the_generated_constructor_of_a_dataclass_is_passed_over():
    made_inside = dict(exec_globals)
    source = inspect.getsource(WarnsWhenMade)
    exec(f'import dataclasses\n{source}', made_inside)
    with pytest.warns(UserWarning, match='made') as caught:
        made_inside['WarnsWhenMade'](1)
    assert caught[0].filename == __file__


def test_the_same_line_warns_once_under_the_default_filter():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')
        for _ in range(3):
            warn_from_inside()
    assert len(caught) == 1


def test_the_category_is_the_one_that_was_asked_for():
    with pytest.warns(DeprecationWarning, match='old'):
        caller_warnings.warn('old', DeprecationWarning)


def test_a_message_is_given_once_where_that_is_asked_for():
    given = {'bias stays dense'}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        with caller_warnings.each_once(given):
            for message in ('w stays dense', 'bias stays dense', 'w stays dense'):
                caller_warnings.warn(message)
        caller_warnings.warn('w stays dense')
    assert [str(warning.message) for warning in caught] == ['w stays dense'] * 2
    assert given == {'w stays dense', 'bias stays dense'}
