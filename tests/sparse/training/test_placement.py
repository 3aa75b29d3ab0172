"""Groups are spread over an axis of a mesh; what cannot be divided lies on each device, and that is said."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers import eight_devices
from jaxpruner import sparse, sparsity_schedules
from sparse.training.models import PARAMS, X, apply_fn, loss

SETTINGS = {
    'sparsity': {'head/*': 0.01, '*': 0.5},
    'block': {'head/*': (2, 3), '*': (2, 8)},
    'algorithm': 'rigl',
    'scheduler': sparsity_schedules.PeriodicSchedule(1),
}


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def check_groups_are_spread_and_train_as_on_one_device():
    # The axis has 3 devices: 22 outputs are 3 groups, and those of the head one.
    mesh = Mesh(np.array(jax.devices()[:3]), ('model',))
    with pytest.warns(UserWarning, match=r"groups of head/kernel cannot be divided.*'model'"):
        spread = sparse.block_sparse(apply_fn, PARAMS, X, **SETTINGS, mesh=mesh, mesh_axis='model')
    assert 'on each device' in spread.plan.leaves['head/kernel'].note
    alone = sparse.block_sparse(apply_fn, PARAMS, X, **SETTINGS)
    results = []
    for model in (spread, alone):
        tx = model.wrap_optax(optax.adam(1e-2))

        def probed(weights, topology, probe, model=model):
            return loss(lambda w, x: model.apply(w, topology, x, probe=probe), weights)

        @jax.jit
        def step(weights, topology, state, model=model, tx=tx, probed=probed):
            gradients, norms = jax.grad(probed, (0, 2))(weights, topology, model.probe())
            updates, state = tx.update(gradients, state, weights)
            weights = optax.apply_updates(weights, updates)
            return model.update(weights, topology, state, tx=tx, step=0, block_norms=norms)

        weights, topology = model.pack(PARAMS)
        weights, topology, state = step(weights, topology, tx.init(weights))
        results.append((weights, topology, state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)
    (weights, topology, state), _ = results
    up = NamedSharding(mesh, PartitionSpec('model'))
    layers = NamedSharding(mesh, PartitionSpec(None, 'model'))
    for tree in (weights, state[0].mu):
        assert tree['up']['kernel']['values'].sharding.is_equivalent_to(up, 4)
        assert tree['layers']['kernel']['values'].sharding.is_equivalent_to(layers, 5)
        assert tree['head']['kernel']['values'].sharding.is_fully_replicated
    assert topology['layers/kernel'].sharding.is_equivalent_to(layers, 3)


def check_explicit_axes_are_refused_where_they_divide():
    if not hasattr(jax.sharding, 'AxisType'):
        pytest.skip('this JAX has no axis types')
    explicit = jax.make_mesh((2,), ('model',), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match=r'mesh has axes of types \(Explicit\).*mesh\.devices'):
        sparse.block_sparse(apply_fn, PARAMS, X, **SETTINGS, mesh=explicit, mesh_axis='model')
    automatic = Mesh(explicit.devices, explicit.axis_names)
    with pytest.warns(UserWarning, match='cannot be divided'):
        sparse.block_sparse(apply_fn, PARAMS, X, **SETTINGS, mesh=automatic, mesh_axis='model')
    model = sparse.block_sparse(apply_fn, PARAMS, X, **SETTINGS)
    params = jax.device_put(PARAMS, NamedSharding(explicit, PartitionSpec()))
    weights, topology = model.pack(params)
    result = model.apply(weights, topology, X)
    np.testing.assert_allclose(result, model.apply(*model.pack(PARAMS), X), rtol=1e-5)
    by_outputs = NamedSharding(explicit, PartitionSpec(None, 'model'))
    params['up']['kernel'] = jax.device_put(PARAMS['up']['kernel'], by_outputs)
    with pytest.raises(ValueError, match=r"params: 'up/kernel'.*Explicit.*'model'.*device_put"):
        model.pack(params)


def test_an_axis_that_the_mesh_lacks_is_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), ('model',))
    with pytest.raises(ValueError, match=r"mesh_axis='data' is no axis.*'model'"):
        sparse.block_sparse(apply_fn, PARAMS, X, **SETTINGS, mesh=mesh, mesh_axis='data')
