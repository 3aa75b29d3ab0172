"""Every workload: a training under RigL, seeds vmapped, traced and not run; sizes; data that are refused."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.baselines import WORKLOADS, t5
from jaxpruner.baselines.training import Training

NEEDS_GYMNAX = pytest.mark.skipif(
    importlib.util.find_spec('gymnax') is None, reason='the games are those of gymnax'
)
NAMES = ['federated', 't5', pytest.param('dqn', marks=NEEDS_GYMNAX)]


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_a_workload_trains_under_rigl(name):
    workload = WORKLOADS[name]
    recipe = workload.default('default')
    data = workload.data(recipe, None)
    targets = Training(workload.task(recipe, data), recipe, 'rigl').targets(0.8)

    def train(data, seed):
        training = Training(workload.task(recipe, data), recipe, 'rigl')
        carry = training.start(training.init(seed), targets, seed)
        after = training.advance(carry, targets, 0, recipe.steps)
        return carry, after, training.evaluate(after, targets)

    seeds = jnp.arange(3)
    carry, after, values = jax.eval_shape(jax.vmap(train, (None, 0)), data, seeds)
    assert jax.tree.structure(carry) == jax.tree.structure(after)
    before = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(carry)]
    assert before == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    metric = workload.task(recipe, data).metric
    assert values[metric.name].shape == (3,)


TEXT = t5.Text.of(bytes(range(256)) * 40)
SIZES = [  # as published
    ('resnet', 'full', None, 25_557_032),
    ('vit', 'full', None, 86_567_656),
    ('lenet', 'data', None, 266_610),
    ('t5', 'full', TEXT, 247_577_856),
    pytest.param('dqn', 'default', None, 132_179, marks=NEEDS_GYMNAX),
    pytest.param('dqn', 'full', None, 1_688_745, marks=NEEDS_GYMNAX),
]


@pytest.mark.parametrize(('name', 'preset', 'data', 'size'), SIZES)
def test_numbers_of_parameters(name, preset, data, size):
    task = WORKLOADS[name].task(WORKLOADS[name].default(preset), data)
    leaves = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    assert sum(leaf.size for leaf in leaves) == size


REFUSED = [
    ('resnet', 'data', {}, None, 'needs --data-dir: a folder with MNIST'),
    ('t5', 'data', {}, None, 'needs --data-dir: a folder with tinyshakespeare.txt'),
    ('vit', 'default', {'data': 'c4'}, None, "'c4' cannot be read by vit: 'digits', 'mnist' and"),
    ('t5', 'default', {'data': 'mnist'}, None, "t5 reads .*, not 'mnist'"),
    (
        'federated',
        'default',
        {},
        'here',
        'digits is read from no folder: leave --data-dir here out',
    ),
    ('t5', 'default', {}, 'here', 'pydoc is read from no folder'),
    ('dqn', 'default', {}, 'here', 'is read from no folder'),
    pytest.param('dqn', 'default', {'data': 'Pong'}, None, "not 'Pong'", marks=NEEDS_GYMNAX),
]


@pytest.mark.parametrize(('name', 'preset', 'changes', 'folder', 'words'), REFUSED)
def test_data_that_cannot_be_read_are_refused(name, preset, changes, folder, words):
    workload = WORKLOADS[name]
    with pytest.raises(ValueError, match=words):
        workload.data(workload.default(preset).updated(changes), folder)
