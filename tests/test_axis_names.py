"""Parameters whose wrappers name their axes: variables of Flax NNX, and arrays as haliax names them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices
from jaxpruner.core import masking

pytestmark = pytest.mark.filterwarnings(
    'error', 'ignore:.*Populating sharding info from sharding file:UserWarning'
)


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Named:
    """An array with a name for each axis, as a `NamedArray` of haliax."""

    array: jax.Array
    axes: tuple

    def __post_init__(self):
        shape = getattr(self.array, 'shape', None)
        if shape is not None and len(shape) != len(self.axes):
            raise ValueError(f'Shape of underlying array {shape} does not match {self.axes}')

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(*children, axes)


def parameters(place=lambda array, axes: array):
    def named(key, shape, axes):
        array = jax.random.normal(jax.random.key(key), shape)
        return Named(place(array, axes), axes)

    return {
        'mlp': {'weight': named(0, (16, 8), ('embed', 'mlp')), 'bias': named(1, (8,), ('mlp',))},
        'head': named(2, (8, 4), ('mlp', 'classes')),
    }


def plain(tree):
    """Parameters without their wrappers."""
    return jax.tree.map(lambda node: node.array, tree, is_leaf=lambda node: isinstance(node, Named))


def make(algorithm='magnitude', packed=False, **settings):
    config = {
        'algorithm': algorithm,
        'sparsity': 0.75,
        'use_packed_masks': packed,
        'update_freq': 1,
        'update_start_step': 0,
        'update_end_step': 2,
    }
    return jaxpruner.create_updater_from_config(config | settings)


def trained(pruner, params, tx=None):
    tx = pruner.wrap_optax(tx or optax.adam(0.1))
    state = tx.init(params)
    if pruner.overrides('get_initial_masks'):
        params = pruner.post_gradient_update(params, state)
    step = jax.jit(tx.update)
    for _ in range(3):
        grads = jax.tree.map(jnp.cos, params)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


ALGORITHMS = ['magnitude', 'global_magnitude', 'rigl', 'magnitude_ste', 'movement', 'acdc']


def check_named_arrays_are_trained_and_placed():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ('embed', 'mlp'))

    def place(array, axes):
        spec = PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes))
        return jax.device_put(array, NamedSharding(mesh, spec))

    for packed in (False, True):
        params = parameters(place)
        tx = make(packed=packed).wrap_optax(optax.adam(0.1))
        state = tx.init(params)
        for _ in range(3):
            _, state = jax.jit(tx.update)(params, state, params)
        mask = state.masks['mlp']['weight']
        if packed:  # whole bytes on each device are of 16 and 8 weights none
            assert not isinstance(mask, Named)
            mask = masking.unpack_masks(state.masks, params)['mlp']['weight']
        assert mask.axes == ('embed', 'mlp')
        assert mask.array.sum() == 32
        if not packed:
            assert mask.array.sharding.spec == PartitionSpec('embed', 'mlp')


class Network(nnx.Module):
    def __init__(self, rngs):
        lecun, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        self.first = nnx.Linear(
            16,
            64,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(lecun, ('rows', 'columns')),
            bias_init=nnx.with_partitioning(zeros, ('columns',)),
        )
        self.second = nnx.Linear(
            64, 4, rngs=rngs, kernel_init=nnx.with_partitioning(lecun, ('columns', None))
        )

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.skipif(not hasattr(jax, 'set_mesh'), reason='this version of JAX sets no mesh')
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('algorithm', ['magnitude', 'rigl'])
def check_nnx_optimizers_train_on_a_mesh(algorithm, packed):
    mesh = jax.make_mesh((2, 4), ('rows', 'columns'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    tx = make(algorithm, packed).wrap_optax(optax.adam(0.1))
    with jax.set_mesh(mesh):

        def start():
            model = Network(nnx.Rngs(0))
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        for model, optimizer in (start(), nnx.jit(start)()):
            specs = nnx.get_partition_spec(nnx.state(optimizer))
            assert specs['opt_state']['masks']['first']['kernel'].get_value() == PartitionSpec(
                'rows', 'columns'
            )
            targets = specs['opt_state']['target_sparsities']
            assert targets['first']['kernel'].get_value() == PartitionSpec()
            for _ in range(3):
                step(model, optimizer, jnp.ones((8, 16)))
            metrics = jaxpruner.sparsity_metrics(optimizer.opt_state)
            assert float(metrics['first/kernel']) == 0.75
            mask = optimizer.opt_state.masks['first']['kernel'].get_value()
            expected = NamedSharding(mesh, PartitionSpec('rows', 'columns'))
            assert mask.sharding.is_equivalent_to(expected, 2)
            assert mask.shape == ((16, 8) if packed else (16, 64))
            assert optimizer.opt_state.masks['first']['bias'] is None


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_named_arrays_are_pruned_as_plain_ones(algorithm, packed):
    pruner = make(algorithm, packed)
    params, state = trained(pruner, parameters())
    expected, plain_state = trained(pruner, plain(parameters()))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), plain(params), expected)
    assert isinstance(params['mlp']['weight'], Named)
    jax.tree.map(
        np.testing.assert_array_equal,
        plain(masking.unpack_masks(state.masks, params)),
        masking.unpack_masks(plain_state.masks, expected),
    )
    assert state.masks['mlp']['bias'] is None
    jax.tree.map(
        np.testing.assert_array_equal, state.target_sparsities, plain_state.target_sparsities
    )
    jax.tree.map(np.testing.assert_array_equal, state.sizes, plain_state.sizes)
    found, wanted = jaxpruner.sparsity_metrics(state), jaxpruner.sparsity_metrics(plain_state)
    assert found['_mask_sparsity'] == wanted['_mask_sparsity']
    assert found['_target_sparsity'] == wanted['_target_sparsity']


def test_sparsities_that_are_traced():
    def masks(sparsity):
        return make(sparsity=sparsity).instant_sparsify(parameters())[1]

    found = jax.jit(masks)(0.5)
    assert found['head'].array.sum() == 16


@pytest.mark.parametrize('packed', [False, True])
def test_checkpoints_are_restored(packed, tmp_path):
    tx = make(packed=packed).wrap_optax(optax.adam(0.1))
    params = parameters()
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'state', state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'state', jax.eval_shape(tx.init, params))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def old_state(tx, params):
    """A state as the library made it before: everything in wrappers, `None` and numbers, too."""
    state = tx.init(params)

    def wrapped(tree):
        by_leaf = jax.tree.leaves(tree, is_leaf=lambda node: node is None)
        return jax.tree.structure(params).unflatten(by_leaf)

    return state._replace(
        masks=wrapped(state.masks), target_sparsities=wrapped(state.target_sparsities)
    )


def test_old_states_go_on_and_old_checkpoints_are_refused_by_name(tmp_path):
    params = nnx.state(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    tx = make().wrap_optax(optax.adam(0.1))
    old = old_state(tx, params)
    assert isinstance(old.target_sparsities['kernel'], type(params['kernel']))
    after = jax.jit(tx.update)(params, old, params)[1]
    expected = jax.jit(tx.update)(params, tx.init(params), params)[1]
    assert jax.tree.structure(after) == jax.tree.structure(old)
    for found, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert float(jaxpruner.sparsity_metrics(after)['_target_sparsity']) == 0.75
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'old', old)
        checkpointer.wait_until_finished()
        # Older versions of Orbax name nothing.
        with pytest.raises(ValueError, match=r'target_sparsities|Expected dict'):
            checkpointer.restore(tmp_path / 'old', jax.eval_shape(tx.init, params))
        target = jax.eval_shape(lambda state: state, old)
        restored = checkpointer.restore(tmp_path / 'old', target)
    jax.tree.map(np.testing.assert_array_equal, restored, old)
