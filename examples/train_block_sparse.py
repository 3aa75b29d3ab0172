"""Trains networks on blocks, with masks, and dense, for as many steps: accuracy, seconds, and weights.

    python examples/train_block_sparse.py                        # digits: LeNet-300-100 and width 1024, three seeds
    python examples/train_block_sparse.py --data-dir folder      # MNIST (mnist.npz)
    python examples/train_block_sparse.py --text --data-dir folder  # a transformer on tinyshakespeare.txt
    python examples/train_block_sparse.py --small                # few steps: shows that everything runs, and no more

Blocks have a term of low rank beside them, and move by RigL. The masks, unstructured RigL, keep as many weights of each
leaf. `--out` gets a JSON file for each run. Ctrl-C loses no more than the run that is trained: the same command goes
on.
Set MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=20000000000 before Python starts, for the seconds.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from jaxpruner.files import atomic_files
from jaxpruner.progress import progress_bar
from jaxpruner.report import figures
from mnist_strategies_data import load_dataset
from oneshot_shakespeare_training import RECIPE, read_text
from oneshot_shakespeare_training import SMALL as SMALL_RECIPE
from train_block_sparse_images import METHODS, NETWORKS, Cell, train
from train_block_sparse_text import SMALL, TextSettings, curve, draw_curves

REFUSED = 2  # the exit status of a program that was called wrongly
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


@dataclasses.dataclass(frozen=True)
class Settings:
    """Compares training on blocks with training under masks, and dense."""

    data_dir: Path | None = None
    """Folder with mnist.npz, or with --text tinyshakespeare.txt; none: digits, or the text inside CPython."""
    text: bool = False
    """Train a character transformer, and draw its loss against the seconds."""
    out: Path = Path('out/train_block_sparse')
    """Folder for the results, a JSON file for each run."""
    image: Path | None = None
    """With --text, the .png, .svg or .pdf to write; none: into --out."""
    networks: tuple[str, ...] = tuple(NETWORKS)
    """Which of lenet and wide."""
    sparsities: tuple[float, ...] = (0.9, 0.95)
    """Of each hidden layer; with --text the first one counts."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters, batches and positions; with --text the first one counts."""
    steps: int = 4000
    """Of training."""
    small: bool = False
    """Few steps and a tiny transformer: shows that everything runs, and no more."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""

    def check(self) -> None:
        """Refuses wrong settings before any work, with a ValueError that names the value and the remedy."""
        unknown = set(self.networks) - set(NETWORKS)
        if unknown:
            raise ValueError(
                f'--networks must be of {", ".join(NETWORKS)}, got {", ".join(unknown)}'
            )
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f'--seeds must be different whole numbers from 0 on, got {self.seeds}')
        if not self.sparsities or not all(0 < sparsity < 1 for sparsity in self.sparsities):
            raise ValueError(f'--sparsities must lie between 0 and 1, got {self.sparsities}')
        if self.steps < 2:
            raise ValueError(f'--steps must be at least 2, got {self.steps}')
        if self.image is not None:
            figures.check_ending(self.image, figures.IMAGE_ENDINGS)

    @property
    def number_of_steps(self) -> int:
        """Of training; few of a small run."""
        return min(self.steps, 4) if self.small else self.steps

    def cells(self) -> Iterator[Cell]:
        """The runs on images; a dense one counts for all sparsities."""
        for network in self.networks:
            for seed in self.seeds:
                for method in METHODS:
                    sparsities = (0.0,) if method == 'dense' else self.sparsities
                    for sparsity in sparsities:
                        yield Cell(network, sparsity, method, seed, self.number_of_steps)


def once(path: Path, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result in a file, made where it is not there yet."""
    if not path.exists():
        text = json.dumps(function())
        atomic_files.replace_file(path, lambda temporary: temporary.write_text(text))
    return json.loads(path.read_text())


def images(settings: Settings) -> str:
    """Trains the classifiers; returns a table."""
    data = load_dataset(settings.data_dir)
    results = []
    for cell in settings.cells():
        path = settings.out / f'{data.name}_{cell.name}.json'
        with progress_bar(cell.steps, settings.progress) as show:
            results.append(once(path, lambda cell=cell, show=show: train(data, cell, show)))
    return table(results)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Accuracies as mean and deviation, seconds as median, and weights, as Markdown."""
    rows: dict[tuple, list[dict[str, Any]]] = {}
    for result in results:
        key = result['network'], result['sparsity'], result['method']
        rows.setdefault(key, []).append(result)
    lines = [
        '| network | sparsity | | accuracy (%) | seconds | weights |',
        '|---|--:|---|--:|--:|--:|',
    ]
    for (network, sparsity, method), found in sorted(rows.items()):
        accuracy = _with_deviation([100 * each['accuracy'] for each in found])
        seconds = np.median([each['seconds'] for each in found])
        weights = int(np.median([each['weights'] for each in found]))
        lines.append(
            f'| {network} | {sparsity:g} | {method} | {accuracy} | {seconds:.1f} | {weights:,} |'
        )
    return '\n'.join(lines)


def _with_deviation(values: Sequence[float]) -> str:
    deviation = f' ± {np.std(values, ddof=1):.2f}' if len(values) > 1 else ''
    return f'{np.mean(values):.2f}{deviation}'


def text_curves(settings: Settings) -> str:
    """Trains the transformer by each method, and draws the losses; returns a table of the last ones."""
    recipe = SMALL_RECIPE if settings.small or settings.data_dir is None else RECIPE
    text = read_text(recipe, settings.data_dir)
    sizes = SMALL if settings.small else TextSettings()
    sparsity, seed, steps = settings.sparsities[0], settings.seeds[0], settings.number_of_steps
    curves = []
    for method in METHODS:
        path = settings.out / f'text_{sizes.width}_{method}_{sparsity:g}_{steps}_{seed}.json'
        with progress_bar(steps, settings.progress) as show:
            curves.append(
                once(
                    path,
                    lambda method=method, show=show: curve(
                        text, sizes, method, sparsity, steps, seed, show
                    ),
                )
            )
    figure = figures.new_figure(6.5, 4)
    draw_curves(figure, curves)
    figures.save(figure, settings.image or settings.out / 'text.png')
    lines = ['| | loss (nats a character) | seconds | weights |', '|---|--:|--:|--:|']
    for found in curves:
        lines.append(
            f'| {found["method"]} | {found["losses"][-1]:.3f} | {found["seconds"][-1]:.1f} | {found["weights"]:,} |'
        )
    return '\n'.join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example with the arguments of a command line; returns the exit status."""
    try:
        settings = tyro.cli(Settings, description=__doc__, args=arguments)
        settings.check()
        print(text_curves(settings) if settings.text else images(settings))
    except (ValueError, OSError) as error:
        print(f'train_block_sparse.py: {error}', file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print('Interrupted. The same command goes on.')
        return INTERRUPTED
    return 0


if __name__ == '__main__':
    sys.exit(main())
