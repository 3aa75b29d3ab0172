"""Trains a character transformer, prunes it once in many ways, and shows the loss of each.

    python examples/oneshot_shakespeare.py --data-dir folder  # with tinyshakespeare.txt: three seeds, an hour on a core
    python examples/oneshot_shakespeare.py --small            # a tiny model on the text inside CPython, seconds
    python examples/oneshot_shakespeare.py --table            # what is there so far

Leaves in `--out` the recipe, checkpoints of the trained models, a JSON file for each result, `table.md` (losses),
`errors.md` (of the outputs of layers), `differences.md` and `sparsity.png`. Ctrl-C loses no more than the last hundred
steps: the same command goes on.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxpruner.baselines.checkpointing import Checkpoints
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.sweeps import claimed, keep_recipe
from jaxpruner.files import atomic_files
from jaxpruner.progress import progress_bar
from jaxpruner.report import plots, tables
from oneshot_shakespeare_differences import differences
from oneshot_shakespeare_pruning import DENSE, OUTPUT_ERROR, prune_all, read_cells, variants
from oneshot_shakespeare_training import RECIPE, SMALL, Training, read_text

REFUSED = 2  # the exit status of a program that was called wrongly
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


@dataclasses.dataclass(frozen=True)
class Settings:
    """Trains a character transformer and prunes it once by magnitude, Wanda, RIA and SparseGPT."""

    data_dir: Path | None = None
    """Folder with tinyshakespeare.txt; none: the folder data/ in the one that JAXPRUNER_SHARED names."""
    out: Path = Path('out/oneshot_shakespeare')
    """Folder for checkpoints and results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the models; batches follow from them, too."""
    small: bool = False
    """A tiny model and few steps, on the text inside CPython: shows that everything runs, and no more."""
    table: bool = False
    """Train and prune nothing: write table, differences and plot of what is there."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""

    def check(self) -> None:
        """Refuses wrong settings before any work, with a ValueError that names the value and the remedy."""
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f'--seeds must be different whole numbers from 0 on, got {self.seeds}')

    @property
    def recipe(self) -> Recipe:
        """Every number of the experiment."""
        return SMALL if self.small else RECIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example with the arguments of a command line; returns the exit status."""
    try:
        settings = tyro.cli(Settings, description=__doc__, args=arguments)
        settings.check()
        if not settings.table:
            run(settings)
        report(settings)
    except (ValueError, OSError) as error:
        print(f'oneshot_shakespeare.py: {error}', file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print('Interrupted. The same command goes on.')
        return INTERRUPTED
    return 0


def run(settings: Settings) -> None:
    """Trains and prunes what has no result yet."""
    recipe, data_dir = settings.recipe, settings.data_dir
    shared = os.environ.get('JAXPRUNER_SHARED')
    if data_dir is None and shared and not settings.small:  # the small text lies in a package
        data_dir = Path(shared, 'data')
    text = read_text(recipe, data_dir)
    training = Training(recipe, text)
    with claimed(settings.out, recipe):
        keep_recipe(settings.out, recipe)
        checkpoints = Checkpoints(settings.out / 'checkpoints')
        for seed in settings.seeds:
            with progress_bar(recipe.steps, settings.progress) as show:
                show_training = functools.partial(show, f'seed {seed}: training')
                trained = training.train(seed, checkpoints, show_training)
            prune_all(training, text, trained, settings.out)


def report(settings: Settings) -> None:
    """Prints the table and the differences, and writes them and the plot."""
    recipe, out = settings.recipe, settings.out
    cells = []
    for variant in variants(recipe):
        cells += read_cells(out / variant.folder)
    if not cells:
        raise FileNotFoundError(
            f'no results in {out}; without --table they are made, --small has others'
        )
    errors = []
    for cell in cells:
        if cell.algorithm != DENSE:
            error = cell.metrics[OUTPUT_ERROR]
            errors.append(dataclasses.replace(cell, metric=OUTPUT_ERROR, value=error))
    texts = {
        'table.md': tables.to_markdown(cells),
        'errors.md': tables.to_markdown(errors),
        'differences.md': differences(recipe, out),
    }
    for name, text in texts.items():
        write = functools.partial(Path.write_text, data=text)
        atomic_files.replace_file(out / name, write)
        print(text)
    plots.plot_metric_against_sparsity(cells, out / 'sparsity.png')
    print(', '.join(str(out / name) for name in (*texts, 'sparsity.png')))


if __name__ == '__main__':
    sys.exit(main())
