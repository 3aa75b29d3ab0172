"""Seeds trained together under `vmap` get the masks and parameters that each gets alone.

Of the all-pairs cover those cases, in order, that show a new optimizer or front-end, or a new pair of packing and
algorithm or sparsity type: what decides which operations are batched.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contract import checks, cover, front_ends, tables, training

pytestmark = pytest.mark.filterwarnings('error')

SEEDS = 3


def shown(case):
    return {
        case.optimizer,
        case.front_end,
        (case.algorithm, case.packed),
        (case.sparsity_type, case.packed),
    }


CASES = cover.each_once(tables.COVER, shown)
PARAMETERS = [
    pytest.param(c, id=str(c), marks=() if c.algorithm == 'magnitude' else pytest.mark.slow)
    for c in CASES
]


@pytest.mark.parametrize('case', PARAMETERS)
def test_seeds_train_together_as_alone(case):
    setup = training.trained(case).setup
    together = run_together(setup)
    for seed in range(SEEDS):
        params, opt_state = training.run(setup.step, setup.start(seed), training.batches())[-1]
        own_params, own_state = jax.tree.map(lambda leaf, seed=seed: leaf[seed], together)
        masks, own_masks = (checks.stored_masks(params, state) for state in (opt_state, own_state))
        assert masks.keys() == own_masks.keys()
        for path, mask in masks.items():
            np.testing.assert_array_equal(own_masks[path], mask)
        values, own_values = training.by_path(params), training.by_path(own_params)
        for path, value in values.items():
            np.testing.assert_allclose(own_values[path], value, rtol=1e-5, atol=1e-5)


def run_together(setup):
    """Parameters and optimizer state after training, with a first axis for the seeds."""
    models = [front_ends.make(setup.case.front_end, seed)[0] for seed in range(SEEDS)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    opt_state = jax.vmap(setup.tx.init)(params)
    if setup.rules.starts_sparse:
        params = jax.vmap(setup.updater.post_gradient_update)(params, opt_state)
    step = training.compiled(setup.case, jax.vmap(setup.step.__wrapped__, in_axes=(0, 0, None)))
    return training.run(step, (params, opt_state), training.batches())[-1]
