"""What all plots share: their figures, colours and files. Needs matplotlib.

No display is needed, and nothing of matplotlib's global state is touched.
"""

import itertools
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
_GRID = '#dddddd'
# Paul Tol's 'muted' colours, which colour-blind readers can tell apart; marks tell them apart in grey.
_COLORS = '#332288 #cc6677 #117733 #999933 #88ccee #882255 #44aa99 #aa4499 #ddaa33'.split()
_MARKS = 'osD^vPX*h'
_LINES = ('-', '--', ':')  # where there are more algorithms than colours


def check_ending(path: Path, endings: tuple[str, ...]) -> Path:
    """Returns the path of an image; raises ValueError if its ending names no format that can be written."""
    if Path(path).suffix not in endings:
        raise ValueError(f'cannot write {path}: its name must end in {" or ".join(endings)}')
    return Path(path)


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
    grid = figure.subplots(rows, columns, squeeze=False, **settings)
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.axis('off')
    return panels[:count]


def save(figure: Any, path: Path) -> None:
    """Writes a figure; the file appears when it is complete."""

    def write(temporary: Path) -> None:
        figure.savefig(temporary, dpi=150)

    atomic_files.replace_file(path, write, keeps_ending=True)


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns a colour and mark for each algorithm, the same in every plot for those of the original's table."""
    styles = {DENSE: {'color': INK, 'marker': ''}}
    original = [name for name in ALGORITHM_ORDER if name != DENSE]
    free = []
    for number, name in enumerate(original):
        styles[name] = _style(number)
        if name not in names:
            free.append(number)
    # Others first take the styles of original algorithms that are not in this plot.
    numbers = itertools.chain(free, itertools.count(len(original)))
    for name in names:
        if name not in ALGORITHM_ORDER:
            styles[name] = _style(next(numbers))
    return styles


def clean(axes: 'Axes', grid: Literal['x', 'y']) -> None:
    """Removes the upper and right border, and adds a light grid."""
    axes.grid(axis=grid, color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)


def _style(number: int) -> dict[str, Any]:
    turn, position = divmod(number, len(_COLORS))
    return {
        'color': _COLORS[position],
        'marker': _MARKS[position],
        'linestyle': _LINES[turn % len(_LINES)],
    }
