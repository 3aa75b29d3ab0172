"""A training that runs in one process on one device, or in two that share a mesh of four devices.

As a script this is one of the two: `python two_processes.py PORT PROCESS FILE` trains all cases and writes what the
process holds of the results, for `test_processes.py` to compare. All processes see the same numbers: weights and
gradients are drawn on the host.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from jaxpruner.report import MaskHistory

STEPS = 6  # masks are updated before steps 0, 2 and 4, weights after all, or after the others
SHAPES = {
    'first': {'kernel': (32, 64), 'bias': (64,)},
    'second': {'kernel': (64, 24), 'bias': (24,)},
}
# Algorithm, and whether masks are packed.
CASES = [('global_magnitude', True), ('rigl', False)]


def draw(seed):
    """A tree of numbers like the parameters."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def place(tree, mesh):
    """Puts host arrays onto a mesh, or, where that is `None`, onto the one device."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)

    def placed(array):
        spec = PartitionSpec(*(('rows', 'columns') if array.ndim == 2 else ('columns',)))
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    return jax.tree.map(placed, tree)


def train(algorithm, is_packed, mesh):
    """Trains one case.

    Returns:
      By step, layer and name: the mask as the state holds it, and the weights as the forward pass uses them.
    """
    schedule = {
        'update_freq': 2,
        'update_start_step': 0,
        'update_end_step': 4,
        'drop_fraction': 0.3,
    }
    config = {'algorithm': algorithm, 'sparsity': 0.75, 'use_packed_masks': is_packed} | schedule
    updater = jaxpruner.create_updater_from_config(config)
    tx = updater.wrap_optax(optax.adam(0.05))

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, updater.pre_forward_update(params, state)

    params = place(draw(0), mesh)
    state = tx.init(params)
    history, recorded = {}, MaskHistory()
    for number in range(1, STEPS + 1):
        params, state, used = step(params, state, place(draw(number), mesh))
        for layer in SHAPES:
            history[number, layer, 'masks'] = state.masks[layer]['kernel']
            history[number, layer, 'used'] = used[layer]['kernel']
        recorded.record(state)
    counts = recorded.counts
    assert counts.weights.tolist() == [32 * 64, 64 * 24]
    assert counts.kept[-1].sum() == counts.weights.sum() // 4
    return history


def own_part(array):
    """What this process holds: pairs of a place in the whole array, and the numbers there."""
    return [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]


def main(port, process, path):
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
        f'localhost:{port}', num_processes=2, process_id=int(process), initialization_timeout=60
    )
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
    # Rows of parameters lie on processes, columns on their devices.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ('rows', 'columns'))
    parts = {case: jax.tree.map(own_part, train(*case, mesh)) for case in CASES}
    pathlib.Path(path).write_bytes(pickle.dumps(parts))
    jax.distributed.shutdown()


if __name__ == '__main__':
    main(*sys.argv[1:])
