"""Draws how fast training on blocks is, over the sparsity and over the width.

    python -m benchmarks sparse_training --json > measured.json
    python examples/sparse_training_picture.py measured.json  # draws docs/images/sparse_training.png

Beside the image stands a .csv of the values that it shows.
"""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxpruner.files import atomic_files
from jaxpruner.report import figures

ROOT = Path(__file__).resolve().parents[1]
REFUSED = 2  # the exit status of a program that was called wrongly
SWEEPS = {'sparsity': 'sparsity (width 1024)', 'width': 'width (sparsity 0.9)'}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Draws how many times as fast as a dense one a training step on blocks is."""

    measured: Annotated[Path, tyro.conf.Positional]
    """What `python -m benchmarks sparse_training --json` printed."""
    image: Path = ROOT / 'docs' / 'images' / 'sparse_training.png'
    """The .png, .svg or .pdf to write."""


def read_points(path: Path) -> list[tuple[str, float, dict[str, float]]]:
    """What was swept, its value, and the ratio with its quartiles.

    Raises:
      ValueError: the file is no output of the benchmark.
    """
    try:
        rows = json.loads(path.read_text())['rows']
        points = []
        for row in rows:
            sweep, _, value = row['name'].partition(' ')
            if sweep in SWEEPS:
                points.append((sweep, float(value), row['times as fast']))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{path} is no output of python -m benchmarks sparse_training --json: {error}'
        ) from error
    if not points:
        raise ValueError(f'{path} has no rows of sparsities or widths')
    return points


def draw(figure: Any, points: Sequence[tuple[str, float, dict[str, float]]]) -> None:
    """Draws a panel for each sweep."""
    panels = figures.make_panels(figure, len(SWEEPS), columns=2)
    for axes, (sweep, title) in zip(panels, SWEEPS.items(), strict=True):
        chosen = [(value, ratio) for name, value, ratio in points if name == sweep]
        values = [value for value, _ in chosen]
        medians = [ratio['median'] for _, ratio in chosen]
        below = [ratio['median'] - ratio['low'] for _, ratio in chosen]
        above = [ratio['high'] - ratio['median'] for _, ratio in chosen]
        axes.errorbar(values, medians, [below, above], color='#332288', marker='o', capsize=3)
        axes.axhline(1, color=figures.INK, lw=0.8, ls=':')
        axes.set_xlabel(title)
        axes.set_ylim(bottom=0)
        if sweep == 'width':
            axes.set_xscale('log', base=2)
            axes.set_xticks(values, [f'{value:.0f}' for value in values])
        figures.clean(axes, 'y')
    panels[0].set_ylabel('dense step / step on blocks')


def as_csv(points: Sequence[tuple[str, float, dict[str, float]]]) -> str:
    """The values as a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(['swept', 'value', 'median', 'low', 'high'])
    for sweep, value, ratio in points:
        writer.writerow([sweep, value, *(ratio[name] for name in ('median', 'low', 'high'))])
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws and writes; returns the exit status."""
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    try:
        figures.check_ending(settings.image, figures.IMAGE_ENDINGS)
        points = read_points(settings.measured)
        figure = figures.new_figure(8, 3.4)
        draw(figure, points)
        figures.save(figure, settings.image)
    except (ValueError, OSError) as error:
        print(f'sparse_training_picture.py: {error}', file=sys.stderr)
        return REFUSED
    values = as_csv(points)
    atomic_files.replace_file(
        settings.image.with_suffix('.csv'), lambda path: path.write_text(values)
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
