"""Configurations as public projects write them train as the classes that they mean."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import algorithms, sparsity_distributions, sparsity_schedules

STEPS = 6


def not_the_head(path, leaf):
    return leaf.ndim > 1 and path[0] != 'head'


def t5x():
    """Pruned once, early; the period of the library's default config is never reached."""
    config = ml_collections.ConfigDict()
    config.algorithm = 'magnitude'
    config.update_freq = 1000
    config.update_end_step = 1
    config.update_start_step = 1
    config.sparsity = 0.75
    config.dist_type = 'uniform'
    config.sparsity_type = 'nm_1,4'
    return config


def dopamine():
    config = t5x()
    config.algorithm = 'rigl'
    config.dist_type = 'erk'
    config.update_freq, config.update_start_step, config.update_end_step = 2, 1, 5
    config.drop_fraction = 0.4
    config.sparsity_type = 'unstructured'
    config.rng_seed = 3
    return config


def scenic():
    """What is not set is `None`."""
    return ml_collections.FrozenConfigDict(
        {
            'algorithm': 'saliency',
            'dist_type': 'erk',
            'sparsity': 0.5,
            'sparsity_type': None,
            'update_freq': 2,
            'update_start_step': 1e0,
            'update_end_step': 4e0,
            'custom_sparsity_map': {('head', 'kernel'): 0.25},
            'drop_fraction': None,
            'rng_seed': ml_collections.config_dict.placeholder(int),
        }
    )


def fedjax():
    return {
        'algorithm': 'global_magnitude',
        'sparsity': 0.5,
        'dist_type': 'uniform',
        'filter_fn': not_the_head,
        'update_freq': 1,
        'update_start_step': 0,
        'update_end_step': 3,
    }


@dataclasses.dataclass
class Settings:
    algorithm: str = 'magnitude_ste'
    sparsity: float = 0.5
    update_freq: int | None = None
    update_start_step: int = 2
    update_end_step: int = 2
    use_packed_masks: bool = True


def never():
    """No start: masks stay as they are."""
    return types.SimpleNamespace(
        algorithm='static_sparse', sparsity=0.5, update_freq=1, update_end_step=5
    )


def uniform(**settings):
    return functools.partial(sparsity_distributions.uniform, **settings)


def erk(**settings):
    return functools.partial(sparsity_distributions.erk, **settings)


CLIENTS = {
    't5x': (
        t5x,
        algorithms.MagnitudePruning(
            sparsity_schedules.OneShotSchedule(1),
            sparsity_type=jaxpruner.NByM(1, 4),
            sparsity_distribution_fn=uniform(sparsity=0.75),
        ),
    ),
    'dopamine': (
        dopamine,
        algorithms.RigL(
            sparsity_schedules.PolynomialSchedule(2, 1, 5),
            sparsity_distribution_fn=erk(sparsity=0.75),
            rng_seed=3,
            drop_fraction_fn=optax.cosine_decay_schedule(0.4, 5),
        ),
    ),
    'scenic': (
        scenic,
        algorithms.SaliencyPruning(
            sparsity_schedules.PolynomialSchedule(2, 1, 4),
            sparsity_distribution_fn=erk(sparsity=0.5, custom_sparsity_map={'head/kernel': 0.25}),
        ),
    ),
    'fedjax': (
        fedjax,
        algorithms.GlobalMagnitudePruning(
            sparsity_schedules.PolynomialSchedule(1, 0, 3), sparsity=0.5, filter_fn=not_the_head
        ),
    ),
    'dataclass': (
        Settings,
        algorithms.SteMagnitudePruning(
            sparsity_schedules.OneShotSchedule(2),
            sparsity_distribution_fn=uniform(sparsity=0.5),
            use_packed_masks=True,
        ),
    ),
    'no start': (
        never,
        algorithms.StaticRandomSparse(
            sparsity_schedules.NoUpdateSchedule(), sparsity_distribution_fn=uniform(sparsity=0.5)
        ),
    ),
}


def initial_params():
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return {'body': {'kernel': draw(8, 16), 'bias': draw(16)}, 'head': {'kernel': draw(16, 4)}}


def loss(params, inputs):
    hidden = jax.nn.relu(inputs @ params['body']['kernel'] + params['body']['bias'])
    return jnp.mean((hidden @ params['head']['kernel']) ** 2)


def train(pruner):
    """The sparsity of the forward pass at each step, and the parameters at the end."""
    tx = pruner.wrap_optax(optax.adam(1e-2))
    params = initial_params()
    state = tx.init(params)
    params = pruner.post_gradient_update(params, state)
    inputs = jnp.asarray(np.random.default_rng(1).normal(size=(STEPS, 4, 8)), jnp.float32)
    sparsities = []
    for step in range(STEPS):
        grads = jax.grad(loss)(pruner.pre_forward_update(params, state), inputs[step])
        updates, state = tx.update(grads, state, params)
        params = pruner.post_gradient_update(optax.apply_updates(params, updates), state)
        used = pruner.pre_forward_update(params, state)
        sparsities.append(
            jaxpruner.summarize_sparsity(used, only_total_sparsity=True)['_total_sparsity']
        )
    return params, sparsities


@pytest.mark.parametrize('client', CLIENTS)
def test_a_configuration_trains_as_the_class_that_it_means(client):
    make_config, expected = CLIENTS[client]
    updater = jaxpruner.create_updater_from_config(make_config())
    assert type(updater) is type(expected)
    assert updater.scheduler == expected.scheduler
    params, sparsities = train(updater)
    expected_params, expected_sparsities = train(expected)
    assert sparsities == expected_sparsities
    for leaf, expected_leaf in zip(
        jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected_leaf)


def test_a_single_update_comes_at_its_step_and_straight_through_is_sparse_before():
    _, sparsities = train(jaxpruner.create_updater_from_config(t5x()))
    assert sparsities[0] == 0
    assert len(set(sparsities[1:])) == 1
    assert sparsities[1] > 0.5
    _, sparsities = train(jaxpruner.create_updater_from_config(Settings()))
    assert len(set(sparsities)) == 1
    assert sparsities[0] > 0.4


def test_lists_as_files_hold_them_name_leaves():
    """A path is a list, and a map a list of pairs."""
    config = fedjax() | {'custom_sparsity_map': [[['body', 'kernel'], 0.25]], 'filter_fn': None}
    updater = jaxpruner.create_updater_from_config(config)
    params, _ = train(updater)
    assert float(jnp.mean(params['body']['kernel'] == 0)) == 0.25
    assert float(jnp.mean(params['head']['kernel'] == 0)) == 0.5
