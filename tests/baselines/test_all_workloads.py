"""Every workload trains under RigL, which asks for most of it, seeds vmapped: traced, not run."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.training import Training

NEEDS_GYMNAX = pytest.mark.skipif(
    importlib.util.find_spec('gymnax') is None, reason='the games are those of gymnax'
)
NAMES = ['federated', 't5', pytest.param('dqn', marks=NEEDS_GYMNAX)]


@pytest.mark.parametrize('name', NAMES)
def test_a_workload_trains_under_rigl(name):
    workload = WORKLOADS[name]
    recipe = workload.default('default')
    data = workload.data(recipe, None)
    training = Training(workload, recipe, 'rigl')
    targets = training.targets(data, 0.8)

    def train(data, seed):
        carry = training.start(data, training.init(data, seed), targets, seed)
        after = training.advance(data, carry, targets, 0, recipe.steps)
        return carry, after, training.evaluate(data, after, targets)

    seeds = jnp.arange(3)
    carry, after, values = jax.eval_shape(jax.vmap(train, (None, 0)), data, seeds)
    assert jax.tree.structure(carry) == jax.tree.structure(after)
    before = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(carry)]
    assert before == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    metric = workload.task(recipe, data).metric
    assert values[metric.name].shape == (3,)


REFUSED = [
    ('resnet', 'data', {}, 'needs --data-dir: a folder with MNIST'),
    ('t5', 'data', {}, 'needs --data-dir: a folder with tinyshakespeare.txt'),
    ('vit', 'default', {'data': 'c4'}, "data 'c4' cannot be read by vit: 'digits', 'mnist' and"),
    ('t5', 'default', {'data': 'mnist'}, "t5 reads .*, not 'mnist'"),
    pytest.param('dqn', 'default', {'data': 'Pong'}, "not 'Pong'", marks=NEEDS_GYMNAX),
]


@pytest.mark.parametrize(('name', 'preset', 'changes', 'words'), REFUSED)
def test_data_that_cannot_be_read_are_refused(name, preset, changes, words):
    workload = WORKLOADS[name]
    with pytest.raises(ValueError, match=words):
        workload.data(workload.default(preset).updated(changes), None)


@pytest.mark.parametrize('name', ['resnet', 'federated', 't5', 'dqn'])
def test_what_does_not_belong_to_a_workload_is_refused(name, tmp_path):
    workload = WORKLOADS[name]
    recipe = workload.default('default')
    words = f'{recipe.data} is read from no folder: leave --data-dir {tmp_path} out'
    with pytest.raises(ValueError, match=words):
        workload.data(recipe, tmp_path)
    with pytest.raises(ValueError, match=f"{name} has no preset 'ful'; did you mean 'full'"):
        workload.default('ful')
