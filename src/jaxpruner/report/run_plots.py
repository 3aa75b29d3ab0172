"""Plots of one's own run, from what a `MaskHistory` recorded. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpruner.report import figures
from jaxpruner.report.figures import INK
from jaxpruner.report.history import MaskCounts, MaskHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two of the colours of figures.styles_of.
_BLUE = '#332288'
_ROSE = '#cc6677'
_PALE = '#b9c0ca'
_BAR_HEIGHT = 0.26  # inches a layer
_LETTER_WIDTH = 0.072  # inches
_MOST_POINTS = 400  # of the schedule
_FEW_RECORDS = 40  # that get marks


def plot_schedule(
    history: MaskHistory,
    path: Path | str | None = None,
    *,
    scheduler: Any = None,
    leaves: Any = '*',
) -> 'Figure':
    """Draws how sparse the masks were over the steps: all leaves together, and each leaf as a pale line.

    Args:
      history: what the training loop recorded.
      path: the image to write, .png, .pdf or .svg; `None` writes none.
      scheduler: the pruner's schedule, drawn beside what became of it.
      leaves: names or globs of the leaves to draw.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: nothing was recorded, a name means no leaf, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import jax.numpy as jnp, optax, jaxpruner
    >>> tx = jaxpruner.StaticRandomSparse(sparsity=0.75).wrap_optax(optax.sgd(0.1))
    >>> history = MaskHistory()
    >>> history.record(tx.init({'w': jnp.ones((4, 4))}))
    >>> plot_schedule(history).axes[0].get_ylabel()
    'pruned weights (%)'
    """
    counts = _counts_of(history, path, leaves)
    figure = figures.new_figure(6.4, 3.6)
    axes = figure.subplots()
    label = counts.leaves[0]
    if len(counts.leaves) > 1:
        label = 'all layers together'
        percents = 100 * counts.sparsity
        lines = axes.step(counts.steps, percents, where='post', color=_PALE, lw=0.9, zorder=1)
        lines[0].set_label('single layers')
    total = _totals(counts)
    marks = _mark('o', counts)
    percents = 100 * total.sparsity
    axes.step(counts.steps, percents, where='post', color=_BLUE, lw=2, label=label, **marks)
    target = total.target[-1]
    axes.axhline(100 * target, color=INK, ls='--', lw=1, label='target', zorder=0)
    if scheduler is not None:
        evenly = np.linspace(counts.steps[0], counts.steps[-1], _MOST_POINTS)
        steps = np.unique(evenly.astype(int))
        percents = []
        for step in steps.tolist():
            # The counter stands at 1 after step 0.
            sparsity = scheduler.get_sparsity_at_step(target, step - 1)
            percents.append(100 * float(sparsity))
        axes.plot(steps, percents, color=_ROSE, ls=':', lw=2, label='schedule')
    axes.set_ylabel('pruned weights (%)')
    axes.set_ylim(-2, 102)
    return _finish(figure, axes, path)


def plot_turnover(
    history: MaskHistory, path: Path | str | None = None, *, leaves: Any = '*'
) -> 'Figure':
    """Draws which share of the kept weights each record dropped and regrew, against the record before.

    A mark stands where a mask changed. A pruner that only removes weights grows none; RigL and SET grow as many as
    they drop. The mask update of a schedule's step 10 stands at 11, the number of steps that are over.

    Args:
      history: what the training loop recorded, at least twice.
      path: the image to write, .png, .pdf or .svg; `None` writes none.
      leaves: names or globs of the leaves that are counted.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: fewer than two records, a name means no leaf, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import jax.numpy as jnp, optax, jaxpruner
    >>> pruner = jaxpruner.MagnitudePruning(scheduler=jaxpruner.OneShotSchedule(0), sparsity=0.75)
    >>> tx, params = pruner.wrap_optax(optax.sgd(0.1)), {'w': jnp.arange(16.0).reshape(4, 4)}
    >>> history, opt_state = MaskHistory(), tx.init(params)
    >>> for _ in range(2):
    ...     history.record(opt_state)
    ...     opt_state = tx.update(params, opt_state, params)[1]
    >>> [line.get_label() for line in plot_turnover(history).axes[0].lines]
    ['dropped', 'brought back']
    """
    counts = _counts_of(history, path, leaves)
    if len(history) < 2:
        raise ValueError('a change needs two records, got 1: record after further steps')
    kept = counts.kept.sum(1)
    dropped = counts.dropped.sum(1)
    regrown = counts.regrown.sum(1)
    kept_before = kept - regrown + dropped
    has_changed = dropped + regrown > 0
    steps = counts.steps[has_changed]
    figure = figures.new_figure(6.4, 3.6)
    axes = figure.subplots()
    # Where as many are regrown as are dropped, the wide line stays visible below the narrow one.
    wide = {'color': _ROSE, 'marker': 'v', 'ms': 9, 'lw': 4}
    narrow = {'color': _BLUE, 'marker': '^', 'ms': 4, 'lw': 1.2}
    for label, number, style in (('dropped', dropped, wide), ('brought back', regrown, narrow)):
        percents = 100 * number / np.maximum(kept_before, 1)
        axes.plot(steps, percents[has_changed], label=label, clip_on=False, **style)
    if not has_changed.any():
        axes.text(0.5, 0.5, 'no mask changed', transform=axes.transAxes, ha='center', color='grey')
    first = counts.steps[0]
    last = counts.steps[-1]
    axes.set_xlim(first, max(last, first + 1))
    axes.set_ylim(bottom=0)
    axes.set_ylabel('share of the kept weights (%)')
    return _finish(figure, axes, path)


def plot_layers(
    history: MaskHistory, path: Path | str | None = None, *, leaves: Any = '*'
) -> 'Figure':
    """Draws the sparsity of each leaf at the last record as bars, with its target and the number of weights kept.

    Args:
      history: what the training loop recorded.
      path: the image to write, .png, .pdf or .svg; `None` writes none.
      leaves: names or globs of the leaves to draw.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: nothing was recorded, a name means no leaf, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import jax.numpy as jnp, optax, jaxpruner
    >>> tx = jaxpruner.StaticRandomSparse(sparsity=0.75).wrap_optax(optax.sgd(0.1))
    >>> history = MaskHistory()
    >>> history.record(tx.init({'w': jnp.ones((4, 4))}))
    >>> [label.get_text() for label in plot_layers(history).axes[0].get_yticklabels()]
    ['w']
    """
    counts = _counts_of(history, path, leaves)
    number = len(counts.leaves)
    longest_name = max(map(len, counts.leaves))
    width = _LETTER_WIDTH * longest_name + 6
    height = _BAR_HEIGHT * number + 1.2
    figure = figures.new_figure(width, height)
    axes = figure.subplots()
    rows = np.arange(number)
    axes.barh(rows, 100 * counts.sparsity[-1], height=0.72, color=_BLUE)
    ends = 100 * counts.targets[-1]
    axes.vlines(ends, rows - 0.46, rows + 0.46, color=_ROSE, lw=2.5, label='target')
    for row, (kept, weights) in enumerate(zip(counts.kept[-1], counts.weights, strict=True)):
        text = f'{kept:,} of {weights:,} kept'
        axes.annotate(
            text,
            (1.01, row),
            xycoords=('axes fraction', 'data'),
            va='center',
            fontsize=8,
            color=INK,
        )
    axes.set_yticks(rows, counts.leaves, fontsize=8)
    axes.set_ylim(number - 0.4, -0.6)  # the first layer on top
    axes.set_xlim(0, 102)
    axes.set_xlabel('pruned weights (%)')
    percent = 100 * _totals(counts).sparsity[-1]
    title = f'step {counts.steps[-1]:,}: {percent:.1f}% pruned'
    axes.set_title(title, loc='left', fontsize=11, color=INK)
    figures.clean(axes, 'x')
    figure.legend(loc='outside upper right', frameon=False)
    return _saved(figure, path)


def _counts_of(history: MaskHistory, path: Path | str | None, leaves: Any) -> MaskCounts:
    """Returns what is to be drawn; the path is checked before anything is computed."""
    if path is not None:
        figures.check_ending(Path(path), figures.IMAGE_ENDINGS)
    if not isinstance(history, MaskHistory):
        raise TypeError(
            f'expected a jaxpruner.report.MaskHistory, which record(opt_state) fills, got {type(history)}'
        )
    return history.counts.select(leaves)


class _Totals(NamedTuple):
    """All leaves together, weighted by size."""

    sparsity: np.ndarray  # float64[n]
    target: np.ndarray  # float64[n]


def _totals(counts: MaskCounts) -> _Totals:
    weights = max(counts.weights.sum(), 1)
    kept = counts.kept.sum(1)
    target = counts.targets @ counts.weights
    return _Totals(1 - kept / weights, target / weights)


def _mark(mark: str, counts: MaskCounts) -> dict[str, Any]:
    """Marks where records are few enough to be told apart."""
    if len(counts.steps) > _FEW_RECORDS:
        return {}
    return {'marker': mark, 'ms': 4}


def _finish(figure: 'Figure', axes: 'Axes', path: Path | str | None) -> 'Figure':
    axes.set_xlabel('step')
    figures.clean(axes, 'y')
    figure.legend(loc='outside upper left', ncols=4, frameon=False)
    return _saved(figure, path)


def _saved(figure: 'Figure', path: Path | str | None) -> 'Figure':
    if path is not None:
        figures.save(figure, Path(path))
    return figure
