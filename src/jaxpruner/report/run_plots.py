"""Plots of one's own run, from what a `MaskHistory` recorded. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.report import figures
from jaxpruner.report.figures import INK
from jaxpruner.report.history import MaskCounts, MaskHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ROSE = '#332288', '#cc6677'  # of the colours of figures.styles_of
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
    figure, axes = _one_panel(figures.new_figure(6.4, 3.6))
    label = counts.leaves[0]
    if len(counts.leaves) > 1:
        label = 'all layers together'
        lines = axes.step(
            counts.steps, 100 * counts.sparsity, where='post', color=_PALE, lw=0.9, zorder=1
        )
        lines[0].set_label('single layers')
    total, target = _totals(counts)
    axes.step(
        counts.steps,
        100 * total,
        where='post',
        color=_BLUE,
        lw=2,
        label=label,
        **_mark('o', counts),
    )
    axes.axhline(100 * target[-1], color=INK, ls='--', lw=1, label='target', zorder=0)
    if scheduler is not None:
        steps = np.unique(np.linspace(counts.steps[0], counts.steps[-1], _MOST_POINTS).astype(int))
        # The counter stands at 1 after step 0.
        asked = [float(scheduler.get_sparsity_at_step(target[-1], int(step) - 1)) for step in steps]
        axes.plot(steps, 100 * np.array(asked), color=_ROSE, ls=':', lw=2, label='schedule')
    axes.set_ylabel('pruned weights (%)')
    axes.set_ylim(-2, 102)
    return _finish(figure, axes, path)


def plot_turnover(
    history: MaskHistory, path: Path | str | None = None, *, leaves: Any = '*'
) -> 'Figure':
    """Draws which share of the kept weights each record dropped and brought back, against the record before.

    A mark stands where a mask changed. A pruner that only removes weights brings none back; RigL and SET bring back as
    many as they drop. The mask update of a schedule's step 10 stands at 11, the number of steps that are over.

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
    kept, dropped, regrown = counts.kept.sum(1), counts.dropped.sum(1), counts.regrown.sum(1)
    kept_before = np.maximum(kept - regrown + dropped, 1)
    changed = dropped + regrown > 0
    figure, axes = _one_panel(figures.new_figure(6.4, 3.6))
    # Where as many come back as are dropped, the wide line stays visible below the narrow one.
    wide = {'color': _ROSE, 'marker': 'v', 'ms': 9, 'lw': 4}
    narrow = {'color': _BLUE, 'marker': '^', 'ms': 4, 'lw': 1.2}
    for label, number, style in (('dropped', dropped, wide), ('brought back', regrown, narrow)):
        shares = 100 * number / kept_before
        axes.plot(counts.steps[changed], shares[changed], label=label, clip_on=False, **style)
    if not changed.any():
        axes.text(0.5, 0.5, 'no mask changed', transform=axes.transAxes, ha='center', color='grey')
    axes.set_xlim(counts.steps[0], max(counts.steps[-1], counts.steps[0] + 1))
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
    names_width = _LETTER_WIDTH * max(map(len, counts.leaves))
    figure, axes = _one_panel(figures.new_figure(names_width + 6, _BAR_HEIGHT * number + 1.2))
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
    total, _ = _totals(counts)
    title = f'step {counts.steps[-1]:,}: {100 * total[-1]:.1f}% pruned'
    axes.set_title(title, loc='left', fontsize=11, color=INK)
    figures.clean(axes, 'x')
    figure.legend(loc='outside upper right', frameon=False)
    return _saved(figure, path)


def _counts_of(history: MaskHistory, path: Path | str | None, leaves: Any) -> MaskCounts:
    """What is to be drawn, after the path was checked, before anything is computed."""
    if path is not None:
        figures.check_ending(Path(path), figures.IMAGE_ENDINGS)
    if not isinstance(history, MaskHistory):
        raise TypeError(
            f'expected a jaxpruner.report.MaskHistory, which record(opt_state) fills, got {type(history)}'
        )
    return history.counts.select(leaves)


def _totals(counts: MaskCounts) -> tuple[np.ndarray, np.ndarray]:
    """Sparsity and target of all leaves together, weighted by size, float64[n] each."""
    weights = max(counts.weights.sum(), 1)
    return 1 - counts.kept.sum(1) / weights, counts.targets @ counts.weights / weights


def _one_panel(figure: 'Figure') -> 'tuple[Figure, Axes]':
    return figure, figure.subplots()


def _mark(mark: str, counts: MaskCounts) -> dict[str, Any]:
    """Marks where records are few enough to be told apart."""
    return {'marker': mark, 'ms': 4} if len(counts.steps) <= _FEW_RECORDS else {}


def _finish(figure: 'Figure', axes: 'Axes', path: Path | str | None) -> 'Figure':
    axes.set_xlabel('step')
    figures.clean(axes, 'y')
    figure.legend(loc='outside upper left', ncols=4, frameon=False)
    return _saved(figure, path)


def _saved(figure: 'Figure', path: Path | str | None) -> 'Figure':
    if path is not None:
        figures.save(figure, Path(path))
    return figure
