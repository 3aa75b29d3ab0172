"""An optimizer's state is told from weights by its names, and is left alone."""

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from jaxpruner.checkpoints import Choice, Leaf, choose, open_checkpoint, prune
from jaxpruner.tree import flatten_with_paths, path_string

PARAMS = {
    'dense': {'kernel': jnp.ones((8, 8)), 'bias': jnp.ones(8)},
    'out': {'kernel': jnp.ones((8, 4))},
}
KERNELS = {'dense/kernel', 'out/kernel'}
STATE = "optimizer's state"


def leaves_of(tree):
    paths, values, _ = flatten_with_paths(tree)
    return {
        path_string(path): Leaf(tuple(np.shape(value)), np.asarray(value).dtype)
        for path, value in zip(paths, values, strict=True)
    }


OPTIMIZERS = {
    'adam': optax.adam(0.1),
    'rmsprop': optax.rmsprop(0.1, momentum=0.9),
    'accumulated': optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    'masked': optax.masked(optax.adam(0.1), {'dense': True, 'out': False}),
    'momentum for some': optax.multi_transform(
        {'sgd': optax.sgd(0.1, momentum=0.9), 'adam': optax.adam(0.1)},
        {'dense': 'sgd', 'out': 'adam'},
    ),
    'muon': optax.chain(optax.clip(1.0), optax.contrib.muon(0.1)),
    'schedule-free': optax.contrib.schedule_free_adamw(0.1),
}


@pytest.mark.parametrize('optimizer', OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize('container', ['state of the optimizer', 'opt_state'])
def test_optimizers_of_optax(optimizer, container):
    leaves = leaves_of({'params': PARAMS, container: optimizer.init(PARAMS)})
    choices = choose(leaves, 0.5)
    moments = [n for n, leaf in leaves.items() if n.startswith(container) and leaf.ndim > 1]
    assert moments
    assert {choices[name] for name in moments} == {STATE}
    pruned = {name for name, choice in choices.items() if isinstance(choice, Choice)}
    assert pruned == {f'params/{name}' for name in KERNELS}


MATRIX = Leaf((8, 4), np.dtype('float32'))
# Names of weights, and of moments.
NAMES = [
    # variational encoders
    (['encoder/mu/kernel', 'encoder/nu/kernel', 'encoder/dense/kernel', 'decoder/kernel'], []),
    (['encoder/mu/kernel', 'encoder/logvar/kernel', 'decoder/out/kernel'], []),
    (['trace', 'kernel'], []),
    (['encoder/fc/kernel', 'head/m/kernel', 'head/v/kernel'], []),
    (['params/up/kernel', 'average/up/kernel'], ['optimizer/0/trace/up/kernel']),
    (['layer.weight'], ['opt_state.layer.exp_avg']),
    (['dense/kernel'], ['optimizer_variables/adam/dense_kernel_momentum']),  # Keras
    (['0/up/kernel', '1/0/count'], ['1/0/mu/up/kernel', '1/0/nu/up/kernel']),  # a pair
]


@pytest.mark.parametrize(('weights', 'moments'), NAMES)
def test_moments_are_told_from_weights_by_their_names(weights, moments):
    choices = choose(dict.fromkeys(weights + moments, MATRIX), 0.5)
    assert [name for name, choice in choices.items() if choice == STATE] == moments


def test_what_is_left_out_is_said_with_the_reason():
    leaves = leaves_of(
        {'params': PARAMS, 'opt_state': optax.adam(0.1).init(PARAMS), 'step': np.int64(3)}
    )
    reasons = choose(leaves, 0.5, [('*params/out*', 'dense')])
    assert isinstance(reasons['params/dense/kernel'], Choice)
    assert reasons['params/out/kernel'] == 'of type dense'
    assert reasons['params/dense/bias'] == 'one dimension or none'
    assert reasons['opt_state/0/nu/out/kernel'] == STATE
    assert reasons['step'] == 'int64, which is not pruned'


def test_the_state_of_a_training_is_left_as_it_is(tmp_path):
    """An orbax checkpoint after one step of Adam."""
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'saved', state.apply_gradients(grads=PARAMS))
    dense = open_checkpoint(tmp_path / 'saved')
    with pytest.warns(UserWarning, match=r"optimizer's state stays .*jaxpruner\.FixedMask"):
        kept = prune(dense, tmp_path / 'out', choose(dense.leaves, 0.5))
    assert kept.keys() == {f'params/{name}' for name in KERNELS}
    out = open_checkpoint(tmp_path / 'out')
    for name in dense.leaves.keys() - kept.keys():
        np.testing.assert_array_equal(out.read(name), dense.read(name))
