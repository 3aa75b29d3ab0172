"""Seeds under `vmap`, checkpoints of orbax, and `nnx.Optimizer`: each trains on as the plain case.

Of the all-pairs cover those cases, in order, that show a new optimizer or front-end, or a new pair of packing and
algorithm or sparsity type: what decides which operations are batched, and the nodes that a checkpoint holds.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxpruner
from contract import checks, cover, front_ends, tables, training

pytestmark = pytest.mark.filterwarnings(
    'error',
    # orbax says so whenever it restores without a target, which is a use to be tested.
    'ignore:.*Populating sharding info from sharding file:UserWarning',
)
SEEDS = 3
HALF = training.STEPS // 2


def shown(case):
    pairs = (case.algorithm, case.packed), (case.sparsity_type, case.packed)
    return {case.optimizer, case.front_end, *pairs}


CASES = [
    pytest.param(c, id=str(c), marks=() if c.algorithm == 'magnitude' else pytest.mark.slow)
    for c in cover.each_once(tables.COVER, shown)
]


@pytest.mark.parametrize('case', CASES)
def test_seeds_train_together_as_alone(case):
    setup = training.trained(case).setup
    models = [front_ends.make(case.front_end, seed)[0] for seed in range(SEEDS)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    opt_state = jax.vmap(setup.tx.init)(params)
    if setup.rules.starts_sparse:
        params = jax.vmap(setup.updater.post_gradient_update)(params, opt_state)
    step = training.compiled(case, jax.vmap(setup.step.__wrapped__, in_axes=(0, 0, None)))
    together = training.run(step, (params, opt_state), training.batches())[-1]
    for seed in range(SEEDS):
        alone = training.run(setup.step, setup.start(seed), training.batches())[-1]
        own = jax.tree.map(lambda leaf, seed=seed: leaf[seed], together)
        masks, own_masks = checks.stored_masks(*alone), checks.stored_masks(*own)
        assert masks.keys() == own_masks.keys()
        for path, mask in masks.items():
            np.testing.assert_array_equal(own_masks[path], mask)
        values, own_values = training.by_path(alone[0]), training.by_path(own[0])
        for path, value in values.items():
            np.testing.assert_allclose(own_values[path], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_continues_from_a_checkpoint(case, tmp_path):
    trained = training.trained(case)
    middle = trained.history[HALF]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'middle', middle)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(lambda tree: tree, middle)
        restored = checkpointer.restore(tmp_path / 'middle', target)
        untyped = checkpointer.restore(tmp_path / 'middle')
    training.assert_same(restored, middle)
    found, saved = by_plain_name(untyped), by_plain_name(middle)
    assert found.keys() == saved.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, saved[name], strict=True)
    # orbax ties arrays to their device, for which jit would compile the step once more.
    free = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), restored)
    continued = training.run(trained.setup.step, free, training.batches()[HALF:])
    for state, uninterrupted in zip(continued, trained.history[HALF:], strict=True):
        training.assert_same(state, uninterrupted)


def by_plain_name(tree):
    """Leaves by path, in which an attribute, a key and an index read alike: orbax restores dicts and lists."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    names = ('/'.join(re.findall(r"[^\[\]'.]+", jax.tree_util.keystr(path))) for path, _ in entries)
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, entries, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', tables.ALGORITHMS)
def test_trains_inside_nnx_optimizer(algorithm):
    """Which takes optimizer states apart and boxes their arrays; masks are updated in each of three steps."""
    kind = {'no_prune': tables.DENSE, 'iterative_nm': '2:4'}.get(algorithm, 'unstructured')
    case = tables.Case(algorithm, True, 'adam', 'nnx', kind, 'uniform')
    schedule = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 2}
    updater = jaxpruner.create_updater_from_config(training.config_of(case) | schedule)
    model, traces = front_ends.Network(nnx.Rngs(0)), []
    nnx.update(model, front_ends.make('nnx', seed=0)[0])
    optimizer = nnx.Optimizer(model, updater.wrap_optax(optax.adam(1e-2)), wrt=nnx.Param)
    if tables.ALGORITHMS[algorithm].starts_sparse:
        start = nnx.state(model, nnx.Param)
        nnx.update(model, updater.post_gradient_update(start, optimizer.opt_state))

    @nnx.jit
    def step(model, optimizer, batch):
        traces.append(1)
        graphdef, params = nnx.split(model, nnx.Param)

        def loss(values):
            used = updater.pre_forward_update(values, optimizer.opt_state)
            return jnp.mean((nnx.merge(graphdef, used)(batch[0]) - batch[1]) ** 2)

        optimizer.update(model, jax.grad(loss)(params))

    for batch in training.batches()[:3]:
        step(model, optimizer, batch)
        checks.check_zeros(case, nnx.state(model, nnx.Param), optimizer.opt_state)
    assert len(traces) == 1
    checks.check_storage(case, nnx.state(model, nnx.Param), optimizer.opt_state)
    checks.check_counts(case, updater, nnx.state(model, nnx.Param), optimizer.opt_state)
