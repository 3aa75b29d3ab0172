"""Draws the picture that opens the README: four sparsity types as masks, and six algorithms over the sparsity.

    python examples/first_picture.py           # trains 93 small networks, draws docs/images/first_picture.png
    python examples/first_picture.py --small   # few steps and cells: shows that everything runs, and no more

`jaxpruner compare` makes the accuracies; it goes on where it was interrupted, and a second run only draws. Beside the
image stands a .csv of the values that it shows.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

import jaxpruner
from jaxpruner.cli.main import main as run_command
from jaxpruner.files import atomic_files
from jaxpruner.report import figures, masks, plots, read_cells
from jaxpruner.report.experiments import DENSE, group_cells

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = (16, 24)  # inputs, outputs
SPARSITY = 0.5  # of the masks: that of 2:4
# What stands above a mask, and the sparsity type that makes it.
TYPES = {
    'unstructured': jaxpruner.Unstructured(),
    'N:M (2 of 4)': jaxpruner.NByM(2, 4, axis=-2),
    'blocks (4×4)': jaxpruner.Block((4, 4)),
    'channels': jaxpruner.Channel(-1),
}
# One of each family; the dense network is what they are compared with.
ALGORITHMS = ('no_prune', 'random', 'magnitude', 'global_magnitude', 'magnitude_ste', 'set', 'rigl')
SPARSITIES = ('0.8', '0.9', '0.95', '0.98', '0.99')


@dataclasses.dataclass(frozen=True)
class Settings:
    """Draws four sparsity types as masks beside the accuracy of six algorithms over the sparsity."""

    folder: Path = Path('out/first_picture')
    """Folder for the results of `jaxpruner compare`."""
    image: Path = ROOT / 'docs' / 'images' / 'first_picture.png'
    """The .png, .svg or .pdf to write."""
    small: bool = False
    """Few steps, algorithms, sparsities and seeds: shows that everything runs, and no more."""


def train(settings: Settings) -> None:
    """Trains what the folder still lacks, by the command that users have."""
    arguments = [
        'compare',
        'digits-lenet',
        '--out',
        str(settings.folder),
        '--algorithms',
    ]
    if settings.small:
        arguments += [*ALGORITHMS[:3], '--sparsities', '0.8', '0.95', '--seeds', '0']
        arguments += ['--set', 'steps=20']
    else:
        arguments += [*ALGORITHMS, '--sparsities', *SPARSITIES, '--seeds', '0', '1', '2']
    status = run_command(arguments)
    if status:
        sys.exit(status)


def masks_of_types() -> dict[str, np.ndarray]:
    """The masks of one random matrix, pruned by magnitude."""
    weights = {'w': jax.random.normal(jax.random.key(0), WEIGHTS)}
    masks = {}
    for name, sparsity_type in TYPES.items():
        _, pruned = jaxpruner.prune(
            weights, algorithm='magnitude', sparsity=SPARSITY, sparsity_type=sparsity_type
        )
        masks[name] = np.asarray(pruned['w'])
    return masks


def draw_masks(figure: Any) -> None:
    """Draws the masks, two by two, with a line that says what is dark."""
    for name, image in masks.draw_masks(figure, masks_of_types(), columns=2).items():
        image.axes.set_title(name, fontsize=11, color=figures.INK)
    title = f'Which weights go together, {SPARSITY:.0%} pruned (kept: dark)'
    figure.suptitle(title, fontsize=12, color=figures.INK)


def draw_accuracy(figure: Any, folder: Path) -> str:
    """Draws the accuracies over the sparsity; returns their means, deviations and numbers of seeds as CSV."""
    cells = read_cells(folder)
    (experiment,) = group_cells(cells)
    axes = figure.subplots()
    plots.draw_metric(axes, experiment, figures.styles_of(experiment.algorithms))
    axes.set_title('', loc='left')
    axes.set_ylabel('accuracy (%)')
    axes.set_xlabel('pruned weights (%)')
    handles, names = axes.get_legend_handles_labels()
    labels = ['dense' if name == DENSE else name for name in names]
    axes.legend(handles, labels, loc='lower left', fontsize=10, frameon=False)
    seeds = len({cell.seed for cell in cells})
    title = f'LeNet-300-100 on digits, mean ± deviation of {seeds} seeds'
    figure.suptitle(title, fontsize=12, color=figures.INK)
    lines = ['algorithm,sparsity,mean,std,n']
    for name in experiment.algorithms:
        for sparsity in [0.0] if name == DENSE else experiment.sparsities:
            summary = experiment.summarize(name, sparsity)
            if summary is not None:
                lines.append(','.join(map(str, [name, sparsity, *summary])))
    return '\n'.join([*lines, ''])


def main() -> None:
    """Trains, draws and writes."""
    settings = tyro.cli(Settings)
    figures.check_ending(settings.image, figures.IMAGE_ENDINGS)
    train(settings)
    figure = figures.new_figure(10, 4.3)
    left, right = figure.subfigures(1, 2, width_ratios=[5, 6], wspace=0.04)
    draw_masks(left)
    values = draw_accuracy(right, settings.folder)
    figures.save(figure, settings.image)
    atomic_files.replace_file(
        settings.image.with_suffix('.csv'), lambda path: path.write_text(values)
    )


if __name__ == '__main__':
    main()
