"""Parameters whose wrappers name their axes: variables of Flax NNX, and arrays as haliax names them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices, steps

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
        return Named(place(jax.random.normal(jax.random.key(key), shape), axes), axes)

    return {
        'mlp': {'weight': named(0, (16, 8), ('embed', 'mlp')), 'bias': named(1, (8,), ('mlp',))},
        'head': named(2, (8, 4), ('mlp', 'classes')),
    }


def plain(tree):
    """Parameters without their wrappers."""
    return jax.tree.map(lambda node: node.array, tree, is_leaf=lambda node: isinstance(node, Named))


def make(algorithm='magnitude', packed=False, **settings):
    window = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 2, 'sparsity': 0.75}
    config = {'algorithm': algorithm, 'use_packed_masks': packed} | window
    return jaxpruner.create_updater_from_config(config | settings)


def check_named_arrays_are_trained_and_placed():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ('embed', 'mlp'))

    def place(array, axes):
        spec = PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes))
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = parameters(place)
    _, state = steps.history(make(), 3, params)[-1]
    mask, weight = (tree['mlp']['weight'] for tree in (state.masks, params))
    assert mask.axes == ('embed', 'mlp')
    assert mask.array.sum() == 32
    assert mask.array.sharding.is_equivalent_to(weight.array.sharding, 2)


class Network(nnx.Module):
    def __init__(self, rngs):
        lecun = nnx.initializers.lecun_normal()
        first, second = (
            nnx.with_partitioning(lecun, names)
            for names in (('rows', 'columns'), ('columns', None))
        )
        self.first = nnx.Linear(16, 64, rngs=rngs, kernel_init=first)
        self.second = nnx.Linear(64, 4, rngs=rngs, kernel_init=second)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.skipif(not hasattr(jax, 'set_mesh'), reason='this version of JAX sets no mesh')
def check_nnx_optimizers_train_on_a_mesh():
    mesh = jax.make_mesh((2, 4), ('rows', 'columns'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = make('rigl', packed=True).wrap_optax(optax.adam(0.1))

    @nnx.jit
    def start():
        model = Network(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    with jax.set_mesh(mesh):
        model, optimizer = start()
        for _ in range(3):
            step(model, optimizer, jnp.ones((8, 16)))
        state = optimizer.opt_state
        assert float(jaxpruner.sparsity_metrics(state)['first/kernel']) == 0.75
        mask = state.masks['first']['kernel'].get_value()
        expected = NamedSharding(mesh, PartitionSpec('rows', 'columns'))
        assert mask.sharding.is_equivalent_to(expected, 2)
        assert mask.size == 16 * 64 // 8


@pytest.mark.parametrize(
    ('algorithm', 'packed'), [('global_magnitude', False), ('rigl', True), ('movement', True)]
)
def test_named_arrays_are_pruned_as_plain_ones(algorithm, packed):
    pruner, params = make(algorithm, packed), parameters()
    (found, state), (expected, of_plain) = (
        steps.history(pruner, 3, tree, tx=optax.adam(0.1))[-1] for tree in (params, plain(params))
    )
    assert isinstance(found['mlp']['weight'], Named)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-6), plain(found), expected)
    masks = plain(jaxpruner.unpack_masks(state.masks, params))
    steps.assert_equal(masks, jaxpruner.unpack_masks(of_plain.masks, plain(params)))
    metrics = [jaxpruner.sparsity_metrics(one)['_mask_sparsity'] for one in (state, of_plain)]
    assert metrics[0] == metrics[1]


def test_checkpoints_are_restored(tmp_path):
    pruner, params = make(packed=True), parameters()
    _, state = steps.history(pruner, 1, params)[-1]
    target = jax.eval_shape(lambda: steps.history(pruner, 0, params)[0][1])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'state', state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'state', target)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    steps.assert_equal(restored, state)
