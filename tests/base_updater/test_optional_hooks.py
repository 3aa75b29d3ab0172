"""A method that has the name of a hook by chance is refused by name, with the remedy."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_schedules

PARAMS = {'w': jnp.arange(1.0, 17).reshape(4, 4)}


def no_arguments(self):
    return None


# The name of a hook, and what a class has under it.
MISTAKEN = [
    ('track', no_arguments),
    ('track', staticmethod(no_arguments)),
    ('track', True),
    ('check_type', no_arguments),
    ('elementwise_score', lambda self, weights: weights),
    ('check_plan', no_arguments),
    ('check_optimizer', no_arguments),
    ('moments_to_reset', lambda self, threshold: threshold),
    ('init_algorithm_state', lambda self, params, target_sparsities, seed: None),
]


@pytest.mark.parametrize(('name', 'member'), MISTAKEN)
def test_a_method_that_takes_other_arguments_is_refused_where_the_class_is_defined(name, member):
    with pytest.raises(TypeError, match=rf'Mine\.{name} is called by wrap_optax with .*rename it'):
        type('Mine', (jaxpruner.MagnitudePruning,), {name: member})


def test_the_message_shows_what_the_method_takes():
    with pytest.raises(TypeError, match=r'got \(self, sparse_state, grads, step\): ') as caught:

        class Mine(jaxpruner.MagnitudePruning):
            def moments_to_reset(self, sparse_state, grads, step):
                return None

    assert '<function' not in str(caught.value)


def test_a_mixin_is_looked_at_too():
    class Logs:
        def track(self):
            """Starts a log."""

    with pytest.raises(TypeError, match=r'Mine\.track .*rename it'):

        class Mine(Logs, jaxpruner.MagnitudePruning):
            pass


def test_a_track_that_lacks_an_argument_is_refused_at_update():
    class Logs(jaxpruner.MagnitudePruning):
        def track(self, name, value, step):
            """Writes a line of a log."""

    tx = Logs(sparsity_schedules.OneShotSchedule(0), sparsity=0.5).wrap_optax(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"Logs\.track is called in each step .*'step'.*rename it"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_hooks_may_name_their_arguments_as_they_like():
    class Mine(jaxpruner.MagnitudePruning):
        def track(self, state, weights, *, step, grads):
            return state, None

        @staticmethod
        def moments_to_reset(*states):
            return None

        @classmethod
        def check_type(cls, *_, **settings):
            """Takes all."""

        def check_plan(self, leaves, is_strict=False):
            """Nothing is said."""

    tx = Mine(sparsity_schedules.OneShotSchedule(0), sparsity=0.5).wrap_optax(optax.sgd(0.1))
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, step=3)
    assert int(state.masks['w'].sum()) == 8
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_a_hook_that_is_replaced_on_one_pruner_is_called():
    pruner = jaxpruner.MagnitudePruning(sparsity_schedules.OneShotSchedule(0), sparsity=0.5)
    called = []

    def track(sparse_state, params):
        called.append('track')
        return sparse_state, None

    def moments_to_reset(old_state, new_state):
        called.append('moments_to_reset')

    pruner.track = track
    pruner.moments_to_reset = moments_to_reset
    tx = pruner.wrap_optax(optax.sgd(0.1))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert called == ['track', 'moments_to_reset']
