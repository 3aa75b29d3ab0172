"""What a training loop records of its masks, whatever way they are stored, and its plots."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.report import MaskHistory, plot_layers, plot_schedule


def draw(seed):
    random = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    first = {'kernel': make(24, 16), 'bias': make(16)}
    return {'first': first, 'second': {'kernel': make(3, 3, 8, 5)}}


SCHEDULE = jaxpruner.PeriodicSchedule(2, 0, 4)
STATIC = jaxpruner.StaticRandomSparse(sparsity=0.75, use_packed_masks=True).wrap_optax(
    optax.adam(0.1)
)


def test_counts_are_those_of_the_masks():
    rigl = jaxpruner.RigL(SCHEDULE, sparsity=0.75)
    tx = optax.chain(optax.MultiSteps(rigl.wrap_optax(optax.adam(0.1)), 2))
    update = jax.jit(tx.update, donate_argnums=1)
    params, recorded, expected = draw(0), MaskHistory(), []
    state = tx.init(params)
    for seed in range(1, 6):
        _, state = update(draw(seed), state, params)
        recorded.record(state)
        masks = jax.tree.leaves(jaxpruner.sparse_states(state)[0].masks)
        expected.append([int(np.array(mask).sum()) for mask in masks])
    counts = recorded.counts
    assert len(recorded.counts.steps) == 5
    assert counts.leaves == ('first/kernel', 'second/kernel')
    assert counts.weights.tolist() == [384, 360]
    assert counts.kept.tolist() == expected
    np.testing.assert_allclose(counts.targets, 0.75)
    np.testing.assert_allclose(counts.sparsity, 1 - counts.kept / counts.weights)
    assert counts.steps.tolist() == [0, 1, 1, 2, 2]


def test_recording_waits_for_nothing_and_states_of_several_models_are_summed():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(draw, range(3)))
    state = jax.vmap(STATIC.init)(stacked)
    recorded = MaskHistory()
    recorded.record(state)  # sizes are read once
    with jax.transfer_guard_device_to_host('disallow_explicit'):
        recorded.record(state, step=jnp.int32(7))
    counts = recorded.counts
    assert counts.weights.tolist() == [3 * 384, 3 * 360]
    assert counts.kept.tolist() == [[3 * 96, 3 * 90]] * 2
    assert counts.steps.tolist() == [0, 7]


def test_what_cannot_be_recorded_is_refused():
    recorded, params = MaskHistory(), draw(0)
    with pytest.raises(ValueError, match=r'record\(opt_state\)'):
        _ = recorded.counts
    with pytest.raises(ValueError, match='no SparseState'):
        recorded.record(optax.adam(0.1).init(params))
    with pytest.raises(TypeError, match=r'inside of a compiled program.*between steps'):
        jax.jit(lambda params: recorded.record(STATIC.init(params)))(params)
    recorded.record(STATIC.init(params))
    with pytest.raises(ValueError, match=r'third/kernel.* in one record alone'):
        recorded.record(STATIC.init({**params, 'third': {'kernel': jnp.ones((4, 4))}}))


# By step: the masks of two leaves of four and eight weights.
MASKS = [
    ([1, 1, 1, 1], [1] * 8),
    ([1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]),
    ([1, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0]),
]
TARGETS = {'a/kernel': np.float32(0.25), 'b/kernel': np.float32(0.75)}


def record():
    history = MaskHistory()
    for step, masks in enumerate(MASKS):
        by_name = dict(zip(TARGETS, (np.array(mask, np.uint8) for mask in masks), strict=True))
        history.record(jaxpruner.SparseState(by_name, target_sparsities=TARGETS), step=10 * step)
    return history


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_the_schedule_shows_all_layers_and_each():
    drawn = lines(plot_schedule(record()))
    total = drawn['all layers together']
    assert total.get_xdata().tolist() == [0, 10, 20]
    np.testing.assert_allclose(total.get_ydata(), 100 * (1 - np.array([12, 7, 5]) / 12))
    np.testing.assert_allclose(drawn['target'].get_ydata(), 100 * 7 / 12)
    np.testing.assert_allclose(drawn['single layers'].get_ydata(), [0, 25, 25])


def test_layers_with_targets_and_counts():
    (axes,) = plot_layers(record()).axes
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [25, 75])
    assert [label.get_text() for label in axes.get_yticklabels()] == ['a/kernel', 'b/kernel']
    assert [text.get_text() for text in axes.texts] == ['3 of 4 kept', '2 of 8 kept']
    targets = [path.vertices[0][0] for path in axes.collections[0].get_paths()]
    np.testing.assert_allclose(targets, [25, 75])
    assert axes.get_title('left') == 'step 20: 58.3% pruned'


@pytest.mark.parametrize('plot', [plot_schedule, plot_layers])
def test_without_records_there_is_no_plot(plot):
    with pytest.raises(ValueError, match='nothing was recorded'):
        plot(MaskHistory())
