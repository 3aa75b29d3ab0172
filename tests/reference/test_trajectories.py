"""Trainings end where those of the original JaxPruner ended (README.md beside this file)."""

import contextlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner

HERE = Path(__file__).parent
CASES = json.loads((HERE / 'trajectories.json').read_text())
OPTIMIZERS = {'sgd_momentum': optax.sgd(0.1, momentum=0.9), 'adam': optax.adam(1e-2)}
LAYERS = ('Dense_0', 'Dense_1')


@pytest.fixture(scope='module')
def arrays():
    with np.load(HERE / 'trajectories.npz') as archive:
        return dict(archive)


def name_of(number):
    config = CASES[number]['config']
    parts = [config['algorithm'], config['dist_type'], config.get('sparsity_type', '')]
    return '-'.join([str(number), *filter(None, parts)])


def train(updater, optimizer, steps, params, x, y):
    """Parameters and state after all steps, as one program."""
    tx = updater.wrap_optax(optimizer)

    def loss(params, state):
        kernels = updater.pre_forward_update(params, state)
        logits = jax.nn.relu(x @ kernels['Dense_0']['kernel']) @ kernels['Dense_1']['kernel']
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(carry, _):
        params, state = carry
        grads = jax.grad(loss)(params, state)
        updates, state = tx.update(grads, state, params)
        params = updater.post_gradient_update(optax.apply_updates(params, updates), state)
        return (params, state), None

    def run(params):
        start = (params, tx.init(params))
        (params, state), _ = jax.lax.scan(step, start, length=steps)
        return params, updater.pre_forward_update(params, state), state

    return jax.jit(run)(params)


def check(number, is_packed, arrays):
    case = CASES[number]
    updater = jaxpruner.create_updater_from_config(
        {**case['config'], 'use_packed_masks': is_packed}
    )
    params = {layer: {'kernel': jnp.asarray(arrays[f'{layer}/kernel'])} for layer in LAYERS}
    x, y = jnp.asarray(arrays['x']), jnp.asarray(arrays['y'])
    is_n_by_m = case['config'].get('sparsity_type', '').startswith('nm_')
    # The original took any sparsity for N:M without a word.
    with (
        pytest.warns(UserWarning, match='contradicts the sparsity type')
        if is_n_by_m
        else contextlib.nullcontext()
    ):
        trained, forward, state = train(
            updater, OPTIMIZERS[case['optimizer']], case['steps'], params, x, y
        )
    for layer in LAYERS:
        expected = arrays[f'params_{number}/{layer}']
        mask = np.asarray(forward[layer]['kernel']) != 0
        assert np.array_equal(mask, arrays[f'mask_{number}/{layer}'] != 0), f'mask of {layer}'
        np.testing.assert_allclose(
            trained[layer]['kernel'], expected, rtol=1e-5, atol=1e-6, err_msg=layer
        )
        bits = state.masks[layer] and state.masks[layer]['kernel']
        if bits is not None:
            assert (bits.size < expected.size / 4) if is_packed else (bits.shape == expected.shape)


def test_the_cases_are_complete():
    assert len(CASES) == 46


# The cases that show a new algorithm, distribution or sparsity type: bits change storage, not arithmetic.
PACKED = {
    value: number
    for number, case in reversed([*enumerate(CASES)])
    for value in map(case['config'].get, ('algorithm', 'dist_type', 'sparsity_type'))
}


@pytest.mark.parametrize('number', range(len(CASES)), ids=name_of)
def test_trainings_end_alike(number, arrays):
    check(number, False, arrays)


@pytest.mark.slow
@pytest.mark.parametrize('number', sorted({*PACKED.values()}), ids=name_of)
def test_packed_trainings_end_alike(number, arrays):
    check(number, True, arrays)
