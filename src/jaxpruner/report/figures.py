"""What all plots share: their figures and colours. Needs matplotlib.

No display is needed, and nothing of matplotlib's global state is touched.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpruner.report import experiments

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = '#222222'
_GRID = '#dddddd'
# Paul Tol's 'muted' colours, which differ for colour-blind eyes, too; marks tell them apart in grey.
_COLORS = '#332288 #cc6677 #117733 #999933 #88ccee #882255 #44aa99 #aa4499 #ddaa33'.split()
_MARKS = 'osD^vPX*h'


def check_ending(path: Path, endings: tuple[str, ...]) -> Path:
    """Returns the path of an image if its ending says a format that can be written.

    Raises:
      ValueError: it does not.

    >>> check_ending(Path('masks.gif'), ('.gif',)).name
    'masks.gif'
    """
    if Path(path).suffix not in endings:
        raise ValueError(f'cannot write {path}: its name must end in {" or ".join(endings)}')
    return Path(path)


def new_figure(width: float, height: float) -> 'Figure':
    """Returns an empty figure of a size in inches, made without matplotlib's global state.

    Raises:
      ImportError: matplotlib is not installed.

    >>> new_figure(4, 3).axes
    []
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'jaxpruner[plot]'") from error
    return Figure(figsize=(width, height), layout='constrained')


def styles_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns a colour and mark for each algorithm, the same in every plot for those of the original's table.

    Args:
      names: of algorithms.

    >>> styles_of(['own'])['own'] != styles_of(['own'])['rigl']
    True
    """
    names = list(names)
    known = [name for name in experiments.ALGORITHM_ORDER if name != experiments.DENSE]
    others = [name for name in names if name not in experiments.ALGORITHM_ORDER]
    # Others look like those that are not in this plot, while there are any.
    numbers = [number for number, name in enumerate(known) if name not in names]
    numbers += range(len(known), len(known) + len(others))
    styles = {experiments.DENSE: {'color': INK, 'marker': ''}}
    for number, name in [*enumerate(known), *zip(numbers, others, strict=False)]:
        style = {'color': _COLORS[number % len(_COLORS)], 'marker': _MARKS[number % len(_MARKS)]}
        # Beyond the colours there are, lines differ.
        styles[name] = style | {'linestyle': ('-', '--', ':')[number // len(_COLORS) % 3]}
    return styles


def clean(axes: 'Axes', grid: Literal['x', 'y']) -> None:
    """Takes away lines that say nothing, and adds a light grid.

    Args:
      axes: a panel.
      grid: 'x' or 'y'.

    >>> clean(new_figure(1, 1).subplots(), 'y')
    """
    axes.grid(axis=grid, color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
