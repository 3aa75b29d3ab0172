"""Every workload trains under every kind of algorithm, seeds vmapped: traced, not run."""

import importlib.util
import tomllib

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.training import Training

NEEDS_GYMNAX = pytest.mark.skipif(
    importlib.util.find_spec('gymnax') is None, reason='the games are those of gymnax'
)
NAMES = ['federated', 't5', pytest.param('dqn', marks=NEEDS_GYMNAX)]


# RigL asks for most of a workload, so that it does for the oldest versions.
ALGORITHMS = [pytest.param(name, marks=pytest.mark.slow) for name in ('saliency', 'magnitude_ste')]


@pytest.mark.parametrize('algorithm', [*ALGORITHMS, 'rigl'])
@pytest.mark.parametrize('name', NAMES)
def test_workload_and_algorithm_fit(name, algorithm):
    workload = WORKLOADS[name]
    recipe = workload.default('default')
    data = workload.data(recipe, None)
    training = Training(workload, recipe, algorithm)
    targets = training.targets(data, 0.8)

    def train(data, seed):
        carry = training.start(targets, seed, *training.init(data, seed))
        after = training.advance(data, targets, carry, 0, recipe.steps)
        return carry, after, training.evaluate(data, training.forward(targets, after), after.state)

    seeds = jnp.arange(3)
    carry, after, values = jax.eval_shape(jax.vmap(train, (None, 0)), data, seeds)
    assert jax.tree.structure(carry) == jax.tree.structure(after)
    before = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(carry)]
    assert before == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    metric = workload.task(recipe, data).metric
    assert values[metric.name].shape == (3,)


@pytest.mark.parametrize('name', NAMES)
def test_recipes_go_to_toml_and_back(name):
    workload = WORKLOADS[name]
    for preset in workload.presets:
        recipe = workload.default(preset)
        assert (recipe.workload, recipe.preset) == (name, preset)
        assert workload.default(preset).updated(tomllib.loads(recipe.to_toml())) == recipe
