"""What all plots share: their figures, colours and files. Needs matplotlib.

No display is needed, and nothing of matplotlib's global state is touched.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpruner.files import atomic_files
from jaxpruner.report.experiments import ALGORITHM_ORDER, DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = '#222222'
IMAGE_ENDINGS = ('.png', '.pdf', '.svg')
# Paul Tol's 'muted' colours, which colour-blind readers can tell apart; marks tell them apart in grey.
COLORS = '#332288 #cc6677 #117733 #999933 #88ccee #882255 #44aa99 #aa4499 #ddaa33'.split()
_MARKS = 'osD^vPX*'  # one less than colours, so that 72 algorithms differ


def check_ending(path: Path | str | None, endings: tuple[str, ...] = IMAGE_ENDINGS) -> None:
    """Raises ValueError if the ending of an image's path, where there is one, names no format that can be written."""
    if path is not None and Path(path).suffix not in endings:
        raise ValueError(f'cannot write {path}: its name must end in {" or ".join(endings)}')


def new_figure(width: float, height: float) -> 'Figure':
    """Returns an empty figure of a size in inches; raises ImportError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'jaxpruner[plot]'") from error
    return Figure(figsize=(width, height), layout='constrained')


def make_panels(figure: Any, count: int, columns: int, **settings: Any) -> list[Any]:
    """Returns `count` panels of a figure, in rows of `columns`. Places that are left over stay empty."""
    rows = math.ceil(count / columns)
    panels = list(figure.subplots(rows, columns, squeeze=False, **settings).flat)
    for axes in panels[count:]:
        axes.axis('off')
    return panels[:count]


def save(figure: Any, path: Path | str | None) -> Any:
    """Writes a figure, if there is a path; the file appears when it is complete. Returns the figure."""
    if path is not None:
        atomic_files.replace_file(Path(path), lambda temporary: figure.savefig(temporary, dpi=150))
    return figure


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns a colour and mark for each algorithm, the same in every plot for those of the original's table."""
    others = dict.fromkeys([*ALGORITHM_ORDER, *names])
    del others[DENSE]
    styles: dict[str, dict[str, Any]] = {DENSE: {'color': INK, 'marker': ''}}
    for i, name in enumerate(others):
        styles[name] = {'color': COLORS[i % len(COLORS)], 'marker': _MARKS[i % len(_MARKS)]}
    return styles


def clean(axes: 'Axes', grid: Literal['x', 'y']) -> None:
    """Removes the upper and right border, and adds a light grid."""
    axes.grid(axis=grid, color='#dddddd', lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)


def draw_layers(
    axes: 'Axes', names: Sequence[str], sparsities: Any, targets: Any, color: str = COLORS[0]
) -> None:
    """Draws the sparsity of each layer as a bar, the first on top, with a mark at its target."""
    rows = range(len(names))
    axes.barh(rows, [100 * sparsity for sparsity in sparsities], height=0.72, color=color)
    ends = ([row - 0.46 for row in rows], [row + 0.46 for row in rows])
    axes.vlines([100 * target for target in targets], *ends, color=INK, lw=1.5, label='target')
    axes.set_yticks(rows, names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 102)
    axes.set_xticks([0, 50, 100])
    clean(axes, 'x')
