"""What a training loop records of its masks: counts, whatever way masks are stored and wherever they lie."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices
from jaxpruner.report import MaskHistory, history

SHAPES = {'first': {'kernel': (24, 16), 'bias': (16,)}, 'second': {'kernel': (3, 3, 8, 5)}}
STEPS = 7


def draw(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def make(name='rigl', wrap=lambda tx: tx, **settings):
    config = {'algorithm': name, 'sparsity': 0.75, 'update_freq': 2, 'drop_fraction': 0.4}
    config |= {'update_start_step': 0, 'update_end_step': 6} | settings
    return wrap(jaxpruner.create_updater_from_config(config).wrap_optax(optax.adam(0.1)))


def train(tx, params=None, number=STEPS):
    """Yields the state after each step, and the masks before any step that donates them."""
    params = draw(0) if params is None else params

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for seed in range(1, number + 1):
        params, state = step(params, state, draw(seed, jax.tree.map(jnp.shape, params)))
        masks = [
            mask
            for found in jaxpruner.sparse_states(state)
            for mask in jax.tree.leaves(found.masks)
        ]
        yield state, [np.array(mask) for mask in masks]


def expected(masks):
    """By the definition: what is kept, dropped and regrown, [3, n, m]."""
    bits = [[np.unpackbits(m) if m.max() > 1 else m.ravel() for m in row] for row in masks]
    rows = []
    for old, new in itertools.pairwise([bits[0], *bits]):
        rows.append(
            [
                [int(b.sum()) for b in new],
                [int((a > b).sum()) for a, b in zip(old, new, strict=True)],
                [int((b > a).sum()) for a, b in zip(old, new, strict=True)],
            ]
        )
    return np.moveaxis(np.array(rows), 1, 0)


SETTINGS = {
    'rigl': {},
    'rigl packed': {'use_packed_masks': True},
    'set': {'name': 'set'},
    'magnitude packed': {'name': 'magnitude', 'use_packed_masks': True},
    'global': {'name': 'global_magnitude'},
    'in a chain': {'wrap': lambda tx: optax.chain(optax.clip(1.0), tx)},
    'several steps': {'wrap': lambda tx: optax.MultiSteps(tx, 2)},
}


@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
def test_counts_are_those_of_the_masks(settings):
    recorded, masks = MaskHistory(), []
    for state, now in train(make(**settings)):
        recorded.record(state)
        masks.append(now)
    counts = recorded.counts
    assert len(recorded) == STEPS
    assert counts.leaves == ('first/kernel', 'second/kernel')
    assert counts.weights.tolist() == [384, 360]
    np.testing.assert_array_equal([counts.kept, counts.dropped, counts.regrown], expected(masks))
    assert counts.dropped.sum() > 0
    np.testing.assert_allclose(counts.targets, 0.75)
    np.testing.assert_allclose(counts.sparsity, 1 - counts.kept / counts.weights)
    micro_steps = 2 if settings is SETTINGS['several steps'] else 1
    assert counts.steps.tolist() == [(step + 1) // micro_steps for step in range(STEPS)]


def test_records_are_fetched_in_between(monkeypatch):
    monkeypatch.setattr(history, '_MOST_ON_DEVICE', 2)
    often, once = MaskHistory(), MaskHistory()
    for state, _ in train(make()):
        often.record(state)
    monkeypatch.undo()
    for state, _ in train(make()):
        once.record(state)
    assert isinstance(often._records[0][0], np.ndarray)
    assert not isinstance(once._records[0][0], np.ndarray)
    jax.tree.map(np.testing.assert_array_equal, often.counts[2:], once.counts[2:])
    assert len(often.counts.steps) == STEPS  # may be asked for more than once


def test_recording_waits_for_nothing(monkeypatch):
    """Nothing is fetched from a device while the loop runs."""
    recorded = MaskHistory()
    states = [state for state, _ in train(make(), number=1)]
    recorded.record(states[0])  # sizes are read once
    with jax.transfer_guard_device_to_host('disallow_explicit'):
        recorded.record(states[0])
    assert recorded.counts.dropped.sum() == 0


def test_states_of_several_models_are_summed():
    tx = make(use_packed_masks=True)
    models = [draw(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    state = jax.vmap(tx.init)(stacked)
    recorded = MaskHistory()
    recorded.record(state)
    counts = recorded.counts
    assert counts.weights.tolist() == [3 * 384, 3 * 360]
    assert counts.kept.tolist() == [[3 * 96, 3 * 90]]
    assert counts.steps.tolist() == [0]


def test_pruners_that_share_a_model_stand_side_by_side():
    labels = {'first': 'a', 'second': 'b'}
    tx = optax.multi_transform({'a': make('static_sparse'), 'b': make('magnitude')}, labels)
    recorded = MaskHistory()
    for state, _ in train(tx):
        recorded.record(state)
    assert recorded.counts.leaves == ('first/kernel', 'second/kernel')
    assert recorded.counts.kept[[0, -1]].tolist() == [
        [96, 246],
        [96, 90],
    ]  # 0.75 (1 - (5 / 6)³) of 360 are 114


def test_a_leaf_of_two_pruners_stands_there_twice():
    inner = make('static_sparse').init(draw(0))
    outer = make('magnitude').init(draw(0))._replace(inner_state=inner)
    recorded = MaskHistory()
    recorded.record(outer)
    assert recorded.counts.leaves == (
        'first/kernel',
        'second/kernel',
        'first/kernel (pruner 2)',
        'second/kernel (pruner 2)',
    )
    assert recorded.counts.kept.tolist() == [[384, 360, 96, 90]]


def test_states_of_flax_nnx():
    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make('magnitude', use_packed_masks=True), wrt=nnx.Param)
    recorded = MaskHistory()

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 16))) ** 2))(model)
        if takes_model:
            optimizer.update(model, grads)
        else:
            optimizer.update(grads)

    takes_model = 'model' in inspect.signature(optimizer.update).parameters
    for _ in range(STEPS):
        step(model, optimizer)
        recorded.record(optimizer.opt_state)
    counts = recorded.counts
    assert counts.leaves == ('kernel',)
    assert counts.steps.tolist() == list(range(1, STEPS + 1))
    assert counts.kept[-1].tolist() == [96] == [16 * 24 // 4]
    assert int((model.kernel[...] != 0).sum()) == 96


def test_a_step_of_ones_own():
    recorded = MaskHistory()
    for number, (state, _) in enumerate(train(make())):
        recorded.record(state, step=100 * number)
    assert recorded.counts.steps.tolist() == [100 * number for number in range(STEPS)]


def test_masks_without_counter_targets_and_sizes():
    recorded = MaskHistory()
    for _ in range(2):
        recorded.record(
            jaxpruner.SparseState({'w': np.array([1, 0, 0], np.uint8), 's': np.uint8(1)})
        )
    counts = recorded.counts
    assert counts.steps.tolist() == [0, 1]
    assert counts.kept.tolist() == [[1, 1], [1, 1]]
    assert np.isnan(counts.targets).all()


def test_leaves_are_selected():
    recorded = MaskHistory()
    recorded.record(next(train(make()))[0])
    counts = recorded.counts.select('second/*')
    assert counts.leaves == ('second/kernel',)
    assert counts.weights.tolist() == [360]
    assert counts.kept.tolist() == [[90]]
    assert counts.targets.shape == (1, 1)
    with pytest.raises(ValueError, match=r"leaves: 'third/.' matches no parameter.*'first/kernel'"):
        recorded.counts.select(['first/*', 'third/*'])


def record_in_jit():
    tx = make()
    jax.jit(lambda params: MaskHistory().record(tx.init(params)))(draw(0))


def record_another_model(**change):
    recorded = MaskHistory()
    recorded.record(make().init(draw(0)))
    recorded.record(make().init(draw(0, SHAPES | change)))


REFUSED = {
    'inside of jit': (record_in_jit, TypeError, 'inside of a compiled program.*between steps'),
    'no pruner': (
        lambda: MaskHistory().record(optax.adam(0.1).init(draw(0))),
        ValueError,
        'no SparseState',
    ),
    'nothing masked': (
        lambda: MaskHistory().record(make('no_prune').init(draw(0))),
        ValueError,
        'no leaf of the optimizer state is masked',
    ),
    'another shape': (
        lambda: record_another_model(second={'kernel': (4, 4)}),
        ValueError,
        r'second/kernel of shape \((3, 3, 8, 5|4, 4)\)',
    ),
    'another leaf': (
        lambda: record_another_model(third={'kernel': (4, 4)}),
        ValueError,
        r'third/kernel of shape \(4, 4\)',
    ),
    'nothing recorded': (lambda: MaskHistory().counts, ValueError, r'record\(opt_state\)'),
}


@pytest.mark.parametrize(('record', 'error', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_is_refused(record, error, message):
    with pytest.raises(error, match=message):
        record()


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def sharded(spec, **settings):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'), **settings)
    shapes = {'w': (64, 48), 'odd': (24, 10)}
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), draw(0, shapes)
    )


@pytest.mark.parametrize('is_packed', [False, True])
@pytest.mark.parametrize('spec', [PartitionSpec('rows', 'columns'), PartitionSpec(None, 'columns')])
def check_sharded_masks(spec, is_packed):
    counts = []
    for params in (sharded(spec), jax.tree.map(np.array, sharded(spec))):
        recorded = MaskHistory()
        for state, _ in train(make('magnitude', use_packed_masks=is_packed), params):
            recorded.record(state)
        counts.append(recorded.counts)
        last = recorded._masks[1]  # by name, w stands second
    sharding = sharded(spec)['w'].sharding
    assert counts[0].dropped.sum() > 0
    for first, second in zip(counts[0][2:], counts[1][2:], strict=True):
        np.testing.assert_array_equal(first, second)
    assert last.size == 64 * 48 // 8
    recorded = MaskHistory()
    recorded.record(make('magnitude', use_packed_masks=is_packed).init(sharded(spec)))
    held = recorded._masks[1]
    assert held.addressable_shards[0].data.size <= held.size // sharding.num_devices * (
        1 if spec[0] else 4
    )


@pytest.mark.skipif(not hasattr(jax.sharding, 'AxisType'), reason='this JAX has no explicit axes')
def check_masks_on_an_explicit_mesh():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    params = sharded(PartitionSpec('rows', 'columns'), axis_types=explicit)
    recorded = MaskHistory()
    state = make('magnitude', update_start_step=0, update_end_step=0).init(params)
    recorded.record(state)
    recorded.record(state)
    assert recorded.counts.kept.tolist() == [[240, 3072]] * 2
