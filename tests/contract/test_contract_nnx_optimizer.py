"""Every algorithm works packed inside `nnx.Optimizer`, which takes optimizer states apart and boxes their arrays."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpruner
from contract import checks, front_ends, tables, training

pytestmark = [pytest.mark.filterwarnings('error'), pytest.mark.slow]

STEPS = 3
# Masks are updated in each step, to the target in the last, which is AC/DC's last sparse phase, too.
SCHEDULE = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': STEPS - 1}
TYPES = {'no_prune': tables.DENSE, 'iterative_nm': '2:4'}


def make_step(updater, traces):
    """A step that changes model and optimizer in place; it notes in `traces` that it is traced."""

    @nnx.jit
    def step(model, optimizer, batch):
        traces.append(1)
        graphdef, params = nnx.split(model, nnx.Param)

        def loss(values):
            used = updater.pre_forward_update(values, optimizer.opt_state)
            return jnp.mean((nnx.merge(graphdef, used)(batch[0]) - batch[1]) ** 2)

        optimizer.update(model, jax.grad(loss)(params))

    return step


@pytest.mark.parametrize('algorithm', tables.ALGORITHMS)
def test_trains_inside_nnx_optimizer(algorithm):
    case = tables.Case(
        algorithm, True, 'adam', 'nnx', TYPES.get(algorithm, 'unstructured'), 'uniform'
    )
    updater = jaxpruner.create_updater_from_config(training.config_of(case) | SCHEDULE)
    model = front_ends.Network(nnx.Rngs(0))
    nnx.update(model, front_ends.make('nnx', seed=0)[0])
    optimizer = nnx.Optimizer(model, updater.wrap_optax(optax.adam(1e-2)), wrt=nnx.Param)
    if tables.ALGORITHMS[algorithm].starts_sparse:
        nnx.update(
            model, updater.post_gradient_update(nnx.state(model, nnx.Param), optimizer.opt_state)
        )
    traces = []
    step = make_step(updater, traces)
    for batch in training.batches()[:STEPS]:
        step(model, optimizer, batch)
        checks.check_zeros(case, nnx.state(model, nnx.Param), optimizer.opt_state)
    assert len(traces) == 1
    checks.check_storage(case, nnx.state(model, nnx.Param), optimizer.opt_state)
    checks.check_counts(case, updater, nnx.state(model, nnx.Param), optimizer.opt_state)
