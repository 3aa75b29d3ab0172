"""Plots of a run that a loop recorded: what is drawn where, and what is refused."""

import matplotlib.figure
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import report
from jaxpruner.report import MaskHistory, plot_layers, plot_schedule, plot_turnover

PLOTS = {'schedule': plot_schedule, 'layers': plot_layers, 'turnover': plot_turnover}
SCHEDULE = jaxpruner.PolynomialSchedule(update_freq=2, update_start_step=2, update_end_step=6)
# By step: the masks of two leaves of four and eight weights.
MASKS = [
    ([1, 1, 1, 1], [1] * 8),
    ([1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]),
    ([1, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0]),
    ([1, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0]),
]
TARGETS = {'a/kernel': np.float32(0.25), 'b/kernel': np.float32(0.75)}


def record(rows=MASKS, targets=TARGETS):
    history = MaskHistory()
    for step, masks in enumerate(rows):
        by_name = dict(zip(targets, (np.array(mask, np.uint8) for mask in masks), strict=True))
        history.record(jaxpruner.SparseState(by_name, target_sparsities=targets), step=10 * step)
    return history


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


@pytest.mark.parametrize('plot', PLOTS.values(), ids=PLOTS)
@pytest.mark.parametrize('ending', ['.png', '.pdf', '.svg'])
def test_a_file_is_written_whole(tmp_path, plot, ending):
    path = tmp_path / 'new folder' / f'plot{ending}'
    figure = plot(record(), path)
    assert isinstance(figure, matplotlib.figure.Figure)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size > 1000


def test_the_schedule_shows_all_layers_and_each(tmp_path):
    drawn = lines(plot_schedule(record()))
    total = drawn['all layers together']
    assert total.get_xdata().tolist() == [0, 10, 20, 30]
    np.testing.assert_allclose(total.get_ydata(), 100 * (1 - np.array([12, 7, 5, 5]) / 12))
    np.testing.assert_allclose(drawn['target'].get_ydata(), 100 * 7 / 12)
    np.testing.assert_allclose(drawn['single layers'].get_ydata(), [0, 25, 25, 25])
    (other,) = [line for name, line in drawn.items() if name.startswith('_')]
    np.testing.assert_allclose(other.get_ydata(), [0, 50, 75, 75])


def test_one_leaf_stands_under_its_name():
    drawn = lines(plot_schedule(record(), leaves='b/*'))
    np.testing.assert_allclose(drawn['b/kernel'].get_ydata(), [0, 50, 75, 75])
    assert 'single layers' not in drawn


def test_the_schedule_stands_where_masks_follow_it():
    """Where masks are updated in every step, the curve goes through all that was recorded."""
    schedule = jaxpruner.PolynomialSchedule(1, 0, 6)
    tx = jaxpruner.MagnitudePruning(scheduler=schedule, sparsity=0.5).wrap_optax(optax.sgd(0.1))
    params = {'w': np.random.default_rng(0).normal(size=(100, 10)).astype(np.float32)}
    state, history = tx.init(params), MaskHistory()
    for _ in range(8):
        _, state = tx.update(params, state, params)
        history.record(state)
    drawn = lines(plot_schedule(history, scheduler=schedule))
    asked = dict(zip(*drawn['schedule'].get_data(), strict=True))
    for step, sparsity in zip(*drawn['w'].get_data(), strict=True):
        assert asked[step] == pytest.approx(sparsity, abs=0.1)


def test_turnover_is_a_share_of_what_was_kept_before():
    drawn = lines(plot_turnover(record()))
    assert drawn['dropped'].get_xdata().tolist() == [10, 20]  # nothing changed at 30
    np.testing.assert_allclose(drawn['dropped'].get_ydata(), [100 * 5 / 12, 100 * 3 / 7])
    np.testing.assert_allclose(drawn['brought back'].get_ydata(), [0, 100 * 1 / 7])


def test_no_turnover_is_said():
    (text,) = plot_turnover(record(MASKS[-2:])).axes[0].texts
    assert text.get_text() == 'no mask changed'


def test_layers_with_targets_and_counts():
    (axes,) = plot_layers(record()).axes
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [25, 75])
    assert [label.get_text() for label in axes.get_yticklabels()] == ['a/kernel', 'b/kernel']
    assert [text.get_text() for text in axes.texts] == ['3 of 4 kept', '2 of 8 kept']
    targets = [path.vertices[0][0] for path in axes.collections[0].get_paths()]
    np.testing.assert_allclose(targets, [25, 75])
    assert axes.get_title('left') == 'step 30: 58.3% pruned'


def test_many_layers_make_a_high_picture():
    few = plot_layers(record())
    names = {f'layer_{number}/kernel': np.float32(0.5) for number in range(60)}
    many = plot_layers(record([[[1, 0]] * 60], names))
    assert many.get_figheight() > 5 * few.get_figheight()


def drawn_texts(figure):
    """All texts but the labels of ticks that lie beyond the ends of their axis."""
    (axes,) = figure.axes
    beyond = set()
    for labels, number, ends in (
        (axes.get_xticklabels(), 0, axes.get_xlim()),
        (axes.get_yticklabels(), 1, axes.get_ylim()),
    ):
        for label in labels:
            if not min(ends) <= label.get_position()[number] <= max(ends):
                beyond.add(label)
    texts = figure.findobj(matplotlib.text.Text)
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    return [text for text in shown if text not in beyond]


@pytest.mark.parametrize('plot', PLOTS.values(), ids=PLOTS)
def test_texts_do_not_lie_over_one_another(plot):
    names = {f'decoder/block_{number}/attention/kernel': np.float32(0.5) for number in range(5)}
    figure = plot(record([[[1, 1]] * 5, [[1, 0]] * 5], names))
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn_texts(figure)]
    overlapping = [
        (a, b)
        for n, (a, first) in enumerate(boxes)
        for b, second in boxes[:n]
        if first.overlaps(second)
    ]
    assert overlapping == []
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text


@pytest.mark.parametrize('plot', PLOTS.values(), ids=PLOTS)
def test_what_cannot_be_drawn_is_refused(plot, tmp_path):
    with pytest.raises(ValueError, match=r'plot\.txt.*\.png'):
        plot(record(), tmp_path / 'plot.txt')
    with pytest.raises(ValueError, match='nothing was recorded'):
        plot(MaskHistory())
    with pytest.raises(TypeError, match=r'MaskHistory.*SparseState'):
        plot(jaxpruner.SparseState({}))
    with pytest.raises(ValueError, match="leaves: 'c' matches no parameter"):
        plot(record(), leaves='c')


def test_a_change_needs_two_records():
    with pytest.raises(ValueError, match='two records, got 1'):
        plot_turnover(record(MASKS[:1]))


def test_all_four_are_found_where_documents_name_them():
    named = 'plot_schedule plot_masks plot_layers plot_turnover'.split()
    assert [getattr(report, name).__name__ for name in named] == named
    assert jaxpruner.report is report
