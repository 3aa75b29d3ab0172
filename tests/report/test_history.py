"""What a training loop records of its masks, whatever way they are stored, and its plots."""

import functools

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.report import MaskHistory, plot_layers, plot_schedule

STEPS = 5


def draw(seed):
    random = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    first = {'kernel': make(24, 16), 'bias': make(16)}
    return {'first': first, 'second': {'kernel': make(3, 3, 8, 5)}}


def make(name='magnitude', wrap=lambda tx: tx, **settings):
    config = {'algorithm': name, 'sparsity': 0.75, 'update_freq': 2, 'drop_fraction': 0.4}
    config |= {'update_start_step': 0, 'update_end_step': 4} | settings
    return wrap(jaxpruner.create_updater_from_config(config).wrap_optax(optax.adam(0.1)))


def train(tx, params):
    """Yields the state after each step, and how many bits its masks have, before a step donates them."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for seed in range(1, STEPS + 1):
        params, state = step(params, state, draw(seed))
        masks = jax.tree.leaves([found.masks for found in jaxpruner.sparse_states(state)])
        yield state, [int(np.unpackbits(np.array(mask)).sum()) for mask in masks]


SETTINGS = {
    'global in a chain': {
        'name': 'global_magnitude',
        'wrap': lambda tx: optax.chain(optax.clip(1.0), tx),
    },
    'rigl in several steps': {'name': 'rigl', 'wrap': lambda tx: optax.MultiSteps(tx, 2)},
}


@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
def test_counts_are_those_of_the_masks(settings):
    recorded, expected = MaskHistory(), []
    for state, kept in train(make(**settings), draw(0)):
        recorded.record(state)
        expected.append(kept)
    counts = recorded.counts
    assert len(recorded) == STEPS
    assert counts.leaves == ('first/kernel', 'second/kernel')
    assert counts.weights.tolist() == [384, 360]
    assert counts.kept.tolist() == expected
    np.testing.assert_allclose(counts.targets, 0.75)
    np.testing.assert_allclose(counts.sparsity, 1 - counts.kept / counts.weights)
    micro_steps = 2 if settings is SETTINGS['rigl in several steps'] else 1
    assert counts.steps.tolist() == [(step + 1) // micro_steps for step in range(STEPS)]


def test_recording_waits_for_nothing_and_states_of_several_models_are_summed():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(draw, range(3)))
    state = jax.vmap(make('static_sparse', use_packed_masks=True).init)(stacked)
    recorded = MaskHistory()
    recorded.record(state)  # sizes are read once
    with jax.transfer_guard_device_to_host('disallow_explicit'):
        recorded.record(state, step=jnp.int32(7))
    counts = recorded.counts
    assert counts.weights.tolist() == [3 * 384, 3 * 360]
    assert counts.kept.tolist() == [[3 * 96, 3 * 90]] * 2
    assert counts.steps.tolist() == [0, 7]


def record_in_jit():
    jax.jit(lambda params: MaskHistory().record(make().init(params)))(draw(0))


def record_another_model():
    recorded = MaskHistory()
    recorded.record(make().init(draw(0)))
    recorded.record(make().init({**draw(0), 'third': {'kernel': jnp.ones((4, 4))}}))


REFUSED = {
    'inside of jit': (record_in_jit, TypeError, 'inside of a compiled program.*between steps'),
    'no pruner': (
        lambda: MaskHistory().record(optax.adam(0.1).init(draw(0))),
        ValueError,
        'no SparseState',
    ),
    'another leaf': (record_another_model, ValueError, 'third/kernel.* in one record alone'),
    'nothing recorded': (lambda: MaskHistory().counts, ValueError, r'record\(opt_state\)'),
}


@pytest.mark.parametrize(('record', 'error', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_is_refused(record, error, message):
    with pytest.raises(error, match=message):
        record()


# By step: the masks of two leaves of four and eight weights.
MASKS = [
    ([1, 1, 1, 1], [1] * 8),
    ([1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]),
    ([1, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0]),
]
TARGETS = {'a/kernel': np.float32(0.25), 'b/kernel': np.float32(0.75)}
PLOTS = {'schedule': plot_schedule, 'layers': plot_layers}


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


@pytest.mark.parametrize('plot', PLOTS.values(), ids=PLOTS)
def test_a_plot_is_written_whole(plot, tmp_path):
    path = tmp_path / 'new folder' / 'plot.png'
    figure = plot(record(), path)
    assert isinstance(figure, matplotlib.figure.Figure)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(ValueError, match=r'plot\.txt.*\.png'):
        plot(record(), tmp_path / 'plot.txt')
    with pytest.raises(ValueError, match='nothing was recorded'):
        plot(MaskHistory())
