"""One panel of a plot: the metric of one workload over the sparsity, a line for each algorithm."""

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpruner.report import figures
from jaxpruner.report.experiments import DENSE, Experiment
from jaxpruner.report.figures import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT_HEIGHT = 0.05  # of a panel
_LABEL_WIDTH = 0.08  # of the label of a sparsity, as a share of its axis


def draw(axes: 'Axes', experiment: Experiment, styles: dict[str, dict[str, Any]]) -> None:
    """Draws the algorithms of a workload; `styles` gives each a colour, mark and line."""
    positions = _positions(experiment.sparsities)
    is_single = len(positions) == 1
    all_series = []
    for name in experiment.algorithms:
        if name == DENSE:
            continue
        series = _series_of(experiment, name, positions)
        if is_single:  # there are no lines to follow, so the algorithms stand side by side
            series.xs[:] += len(all_series)
        _draw_series(axes, series, styles[name], is_single)
        all_series.append(series)
    dense = _series_of(experiment, DENSE, {0.0: 0.0})
    if dense.means.size and math.isfinite(dense.means[0]):
        mean = dense.means[0]
        deviation = dense.deviations[0]
        axes.axhline(mean, color=INK, ls='--', lw=1.2, label=DENSE, zorder=1)
        axes.axhspan(mean - deviation, mean + deviation, color=INK, alpha=0.08, lw=0, zorder=0)
    _cut_far_outliers(axes, experiment.better == 'high', [*all_series, dense], styles)
    if is_single:
        axes.set_xticks([])
        axes.set_xlabel(f'sparsity {100 * experiment.sparsities[0]:.4g}%')
    else:
        axes.set_xticks(list(positions.values()), _tick_labels(positions))
        axes.set_xlabel('sparsity (%)')
    axes.set_ylabel(f'{experiment.axis}, {experiment.better} is good')
    axes.set_title(experiment.label, loc='left', fontsize=11, color=INK)
    figures.clean(axes, 'y')


class _Series(NamedTuple):
    """What one algorithm reached at each sparsity: three arrays of one length."""

    name: str
    xs: np.ndarray
    means: np.ndarray  # NaN if not finite
    deviations: np.ndarray


def _series_of(experiment: Experiment, name: str, positions: dict[float, float]) -> _Series:
    xs = []
    means = []
    deviations = []
    for sparsity, x in positions.items():
        summary = experiment.summarize(name, sparsity)
        if summary is None:
            continue
        mean = experiment.factor * summary.mean
        deviation = experiment.factor * (summary.deviation or 0.0)
        xs.append(x)
        means.append(mean if math.isfinite(mean) else math.nan)
        deviations.append(deviation)
    return _Series(name, np.array(xs), np.array(means), np.array(deviations))


def _draw_series(axes: 'Axes', series: _Series, style: dict[str, Any], is_single: bool) -> None:
    name, xs, means, deviations = series
    if np.isnan(means).all():
        return
    if is_single:
        marks: dict[str, Any] = style | {'linestyle': ''}
        axes.errorbar(xs, means, deviations, label=name, capsize=3, ms=6, **marks)
        return
    axes.plot(xs, means, label=name, ms=5, **style)
    lower = means - deviations
    upper = means + deviations
    axes.fill_between(xs, lower, upper, color=style['color'], alpha=0.15, lw=0)


def _positions(sparsities: Sequence[float]) -> dict[float, float]:
    """Places sparsities on their axis: halving what is kept is always one step, and sparsity 1 one step more."""
    positions = {}
    end = 1.0
    for sparsity in sparsities:
        if sparsity < 1:
            positions[sparsity] = -math.log2(1 - sparsity)
            end = positions[sparsity] + 1
        else:
            positions[sparsity] = end
    return positions


def _tick_labels(positions: dict[float, float]) -> list[str]:
    """Writes the sparsities in per cent; empty where a label would lie over the one before."""
    ends = positions.values()
    room = _LABEL_WIDTH * (max(ends) - min(ends))
    labels = []
    last = -math.inf
    for sparsity, position in positions.items():
        if position - last >= room:
            labels.append(f'{100 * sparsity:.4g}')
            last = position
        else:
            labels.append('')
    return labels


def _cut_far_outliers(
    axes: 'Axes',
    is_high_good: bool,
    all_series: Sequence[_Series],
    styles: dict[str, dict[str, Any]],
) -> None:
    """Ends the axis before means that are far worse than all others, which they would squeeze flat, and names them."""
    sign = 1 if is_high_good else -1  # times the metric: more is better
    means = sign * np.concatenate([series.means for series in all_series])
    deviations = np.concatenate([series.deviations for series in all_series])
    is_finite = ~np.isnan(means)
    limits = _range_without_outliers(means[is_finite], deviations[is_finite])
    if limits is None:
        return
    worst, best = limits
    lines: collections.Counter[float] = collections.Counter()  # of text at each x
    for series in all_series:
        for x, y in zip(series.xs, series.means, strict=True):
            if sign * y < worst:
                text = f'{series.name} {y:.4g}'
                color = styles[series.name]['color']
                _name_at_edge(axes, is_high_good, text, x, lines[x], color)
                lines[x] += 1
    height = best - worst
    margin = 0.05 * height
    text_height = _TEXT_HEIGHT * max(lines.values()) * height
    ends = sign * (worst - margin - text_height), sign * (best + margin)
    axes.set_ylim(min(ends), max(ends))


def _name_at_edge(
    axes: 'Axes', is_high_good: bool, text: str, x: float, line: int, color: str
) -> None:
    """Writes a text at the bad end of a panel, with an arrow that points out of it, `line` lines from the edge."""
    left, right = axes.get_xlim()
    share = (x - left) / (right - left)
    if share < 1 / 3:
        alignment = 'left'
    elif share > 2 / 3:
        alignment = 'right'
    else:
        alignment = 'center'
    height = 0.02 + _TEXT_HEIGHT * line
    arrow = '↓' if is_high_good else '↑'
    axes.text(
        x,
        height if is_high_good else 1 - height,
        f'{text} {arrow}',
        transform=axes.get_xaxis_transform(),
        ha=alignment,
        va='bottom' if is_high_good else 'top',
        fontsize=8,
        color=color,
    )


def _range_without_outliers(
    means: np.ndarray, deviations: np.ndarray
) -> tuple[float, float] | None:
    """Finds the range to show if some means, of which more is better, lie far below the others; `None` to show all.

    Far is beyond Tukey's outer fence: three times the distance between the quartiles from the lower one.
    """
    if not means.size:
        return None
    lower, upper = np.quantile(means, [0.25, 0.75])
    fence = lower - 3 * (upper - lower)
    is_near = means >= fence
    if is_near.all():
        return None
    worst = (means - deviations)[is_near].min()
    best = (means + deviations)[is_near].max()
    is_worth_it = worst < best and worst - means.min() >= best - worst
    return (worst, best) if is_worth_it else None
