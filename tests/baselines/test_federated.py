import jax
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.baselines.federated import Clients, FederatedWorkload, split_by_label
from jaxpruner.baselines.task import Carry

WORKLOAD = FederatedWorkload()
TINY = {
    'steps': 3,
    'batch_size': 6,
    'model': {'filters': [2, 3], 'hidden': 5, 'classes': 3},
    'task': {'clients': 4, 'clients_per_round': 2, 'local_steps': 2},
}


def clients(count=4, examples=6):
    """Images whose label is where they are bright."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, (count, examples)).astype(np.int32)
    images = random.normal(size=(count, examples, 8, 8, 1)).astype(np.float32) * 0.1
    images[..., :2, :, 0] += labels[..., None, None]
    members = np.arange(count * examples).reshape(count, examples)
    everything = images.reshape(-1, 8, 8, 1), labels.reshape(-1)
    return Clients(*everything, members, np.full(count, examples), images[0], labels[0])


def start(task, updater, tx):
    params = task.init(jax.random.key(0))
    return Carry(params, None, tx.init(params), jax.random.key(1))


def test_clients_have_few_labels_and_share_no_example():
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    places = split_by_label(labels, clients=20, shards=2)
    assert places.shape == (20, 50)
    assert len(np.unique(places)) == places.size
    assert max(len(np.unique(labels[mine])) for mine in places) <= 4
    with pytest.raises(ValueError, match='3 examples cannot be cut into 2 x 2 shards'):
        split_by_label(labels[:3], 2, 2)


def test_one_client_and_one_step_are_sgd():
    """The pseudo-gradient is then the client's rate times the gradient on all its examples."""
    recipe = WORKLOAD.default('default').updated(
        {**TINY, 'task': {'clients_per_round': 1, 'local_steps': 1, 'client_learning_rate': 0.5}}
    )
    data = clients(count=1)
    task = WORKLOAD.task(recipe, data)
    updater = jaxpruner.NoPruning()
    tx = updater.wrap_optax(optax.sgd(1.0))
    carry = start(task, updater, tx)
    after = jax.jit(lambda carry: task.step(updater, tx, carry, 0).params)(carry)
    grads = jax.jit(jax.grad(lambda p: task.loss(p, None, (data.images, data.labels), None)[0]))(
        carry.params
    )
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, carry.params, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after, expected
    )


def test_a_client_uses_its_own_examples_alone():
    """Those behind its number are never drawn, and those it has come again where there are few."""
    recipe = WORKLOAD.default('default').updated({**TINY, 'task': {'clients_per_round': 1}})
    data = clients(count=1, examples=8)
    few = data._replace(counts=np.array([3]))
    spoiled = few._replace(images=data.images.copy())
    spoiled.images[3:] = np.nan
    updater = jaxpruner.NoPruning()
    tx = updater.wrap_optax(optax.sgd(1.0))

    @jax.jit
    def one_round(data):
        task = WORKLOAD.task(recipe, data)
        return task.step(updater, tx, start(task, updater, tx), 0).params

    jax.tree.map(np.testing.assert_array_equal, one_round(few), one_round(spoiled))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(one_round(spoiled)))
