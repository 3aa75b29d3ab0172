"""Trains a small CNN on real digits, dense and sparse by every algorithm, and compares them.

    python examples/digits.py                          # scikit-learn's digits, all algorithms, about two minutes
    python examples/digits.py --algorithms magnitude rigl --sparsity 0.95
    python examples/digits.py --data-dir folder        # MNIST (mnist.npz, or the four IDX files, plain or gzipped),
                                                       # about ten minutes

Prints a table and writes `results.json` and two plots to `out/`. Ctrl-C keeps the algorithms that have finished,
and the same command goes on from there.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import jaxpruner
from digits_data import Dataset, load_dataset
from digits_plots import plot_accuracy, plot_first_layer_masks
from digits_report import Result, ResultsFile, make_table
from digits_training import Program, Training, build_program, test_accuracy, train

DENSE = 'no_prune'
FAMILIES = {
    DENSE: 'dense',
    'magnitude_ste': 'straight-through',
    'random_ste': 'straight-through',
    'static_sparse': 'sparse from the start',
    'set': 'sparse from the start',
    'rigl': 'sparse from the start',
    'acdc': 'alternating',
}
# N:M is the same in every layer, so its sparsity is not spread. The first glob that matches a weight decides: the head
# stays dense, since groups of 4 do not divide its 10 outputs.
TWO_OF_FOUR: dict[str, Any] = {
    'sparsity': 0.5,
    'dist_type': 'uniform',
    'sparsity_type': {'head/kernel': None, '*': '2:4'},
}
PATTERNS: dict[str, dict[str, Any]] = {
    'magnitude_2:4': {'algorithm': 'magnitude', **TWO_OF_FOUR},
    'magnitude_block': {'algorithm': 'magnitude', 'sparsity_type': 'block_4,4'},
    'iterative_nm': {'algorithm': 'iterative_nm', **TWO_OF_FOUR},
}
REFUSED = 2  # the exit status of a program that was called wrongly
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


@dataclasses.dataclass(frozen=True)
class Settings:
    """Compares the pruning algorithms on a small CNN."""

    algorithms: tuple[str, ...] = ()
    """Names of algorithms, `magnitude_2:4` and `magnitude_block`; none: all. Dense always runs first."""
    sparsity: float = 0.9
    """Share of the weights to remove; 2:4 and iterative_nm remove half."""
    distribution: Literal['uniform', 'erk'] = 'erk'
    """How the sparsity is spread over the layers."""
    steps: int = 1000
    """Training steps."""
    seeds: int = 3
    """Runs of each algorithm: other weights, batches and random masks."""
    batch_size: int = 128
    """Images per step."""
    learning_rate: float = 1e-2
    """Adam's, at the start of its cosine decay."""
    start_share: float = 0.2
    """Share of the steps after which masks are first updated."""
    end_share: float = 0.75
    """Share of the steps after which masks stay."""
    update_share: float = 0.025
    """Share of the steps between two mask updates, and the length of a phase of acdc."""
    drop_fraction: float = 0.3
    """Share of the kept weights that set and rigl replace, at first."""
    data_dir: Path | None = None
    """Folder with mnist.npz or MNIST's four IDX files; none: scikit-learn's digits."""
    split_seed: int = 0
    """Which of scikit-learn's digits are held out for testing."""
    over_seeds: Literal['map', 'vmap'] = 'map'
    """How one program trains all seeds: one after the other, or together; equally fast on a CPU."""
    out: Path = Path('out')
    """Folder for the results and plots."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""
    fresh: bool = False
    """Train again what an interrupted run has finished."""

    def check(self) -> None:
        """Refuses what cannot be meant, before any training.

        Raises:
          ValueError: with the value and what would be right.
        """
        for name in ('steps', 'seeds', 'batch_size'):
            if getattr(self, name) < 1:
                raise ValueError(f'--{name.replace("_", "-")} must be at least 1, got {getattr(self, name)}')
        known = known_names()
        for name in self.algorithms:
            if name not in known:
                raise ValueError(f'--algorithms: {name!r} is unknown; choose from {", ".join(known)}')
        for name in self.chosen():
            jaxpruner.create_updater_from_config(self.updater_config(name))

    def chosen(self) -> list[str]:
        """Returns the names of what is to be trained, dense first, each once."""
        return list(dict.fromkeys([DENSE, *(self.algorithms or known_names())]))

    def updater_config(self, name: str) -> dict[str, Any]:
        """Returns the configuration for `jaxpruner.create_updater_from_config`: one schedule for all."""
        frequency = max(1, round(self.update_share * self.steps))
        return {
            'algorithm': name,
            'sparsity': self.sparsity,
            'dist_type': self.distribution,
            'update_freq': frequency,
            'update_start_step': round(self.start_share * self.steps),
            'update_end_step': round(self.end_share * self.steps),
            'drop_fraction': self.drop_fraction,
            **PATTERNS.get(name, {}),
        }

    def asked(self, name: str) -> str:
        """Returns the sparsity asked of an algorithm as the table shows it."""
        if name == DENSE:
            return '0%'
        two_of_four = TWO_OF_FOUR.items() <= PATTERNS.get(name, {}).items()
        return '2:4' if two_of_four else f'{100 * self.sparsity:g}%'

    def training(self) -> Training:
        """Returns what every algorithm shares."""
        return Training(self.steps, self.seeds, self.batch_size, self.learning_rate, self.over_seeds)

    def identity(self) -> dict[str, Any]:
        """Returns what two runs must share for one to continue the other."""
        free = 'out', 'progress', 'fresh'
        shared = {key: value for key, value in dataclasses.asdict(self).items() if key not in free}
        return {**shared, 'algorithms': self.chosen(), 'data_dir': self.data_dir and str(self.data_dir)}


def known_names() -> list[str]:
    """Returns every name that `--algorithms` takes."""
    return list(dict.fromkeys([*jaxpruner.all_algorithm_names(), *PATTERNS]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo with the arguments of a command line; returns the exit status."""
    try:
        settings = tyro.cli(Settings, description=__doc__, args=arguments)
        settings.check()
        dataset = load_dataset(settings.data_dir, settings.split_seed)
        file = ResultsFile(settings.out, settings.identity(), fresh=settings.fresh)
    except (ValueError, OSError) as error:
        print(f'digits.py: {error}', file=sys.stderr)
        return REFUSED
    return compare(settings, dataset, file)


def compare(settings: Settings, dataset: Dataset, file: ResultsFile) -> int:
    """Trains, prints and plots; returns the exit status."""
    began = time.perf_counter()
    console = Console(highlight=False)
    if file.results:
        already = f'{len(file.results)} algorithms are in {file.path} already'
        console.print(f'Continuing: {already} (--fresh trains them again).', soft_wrap=True)
    try:
        run_all(settings, dataset, file)
        finished = True
    except KeyboardInterrupt:
        finished = False
    if file.results:
        show(file.results, settings, dataset, console)
    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    console.print(f'{len(file.results)} of {len(settings.chosen())} algorithms in {minutes}:{seconds:02d} min.')
    if not finished:
        console.print('Interrupted. The same command continues with the next algorithm.')
    return 0 if finished else INTERRUPTED


def run_all(settings: Settings, dataset: Dataset, file: ResultsFile) -> None:
    """Trains what has no result yet, and writes each result when it is there."""
    training = settings.training()
    # On the device once, not once for each algorithm.
    dataset = dataset._replace(x_train=jnp.asarray(dataset.x_train), y_train=jnp.asarray(dataset.y_train))
    left = [name for name in settings.chosen() if file.get(name) is None]
    dense: Program | None = None
    with make_progress(settings) as progress:
        task = progress.add_task('compiling', total=len(left) * settings.steps)
        for number, name in enumerate(left):
            began = time.perf_counter()
            progress.update(task, description=f'{name}: compiling')
            # Also when its result is there: it is what the others are timed against.
            dense = dense or build_program(settings.updater_config(DENSE), dataset, training)
            program = dense if name == DENSE else build_program(settings.updater_config(name), dataset, training)

            def on_chunk(steps: int, name: str = name, before: int = number * settings.steps) -> None:
                progress.update(task, description=name, completed=before + steps)

            outcome = train(program, dense, training, on_chunk)
            file.add(make_result(name, settings, dataset, outcome.params, outcome.relative_time, began))
    file.write(finished=True)


def make_result(
    name: str, settings: Settings, dataset: Dataset, params: Any, relative_time: float, began: float
) -> Result:
    """Measures what was trained: accuracy on the test images, and zeros among the kernels."""
    # A variable of flax is a pytree of one array.
    kernels = {layer: jax.tree.leaves(params[layer]['kernel'])[0] for layer in params}
    summaries = [
        jaxpruner.summarize_sparsity(jax.tree.map(lambda kernel, seed=seed: kernel[seed], kernels))
        for seed in range(settings.seeds)
    ]
    return Result(
        name=name,
        family='N:M and blocks' if name in PATTERNS else FAMILIES.get(name, 'pruned while training'),
        asked=settings.asked(name),
        accuracies=test_accuracy(dataset, params).tolist(),
        sparsities=[summary['_total_sparsity'] for summary in summaries],
        relative_time=relative_time,
        first_layer_mask=(kernels['conv1'][0] != 0).astype(int).tolist(),
        seconds=time.perf_counter() - began,
    )


def show(results: Sequence[Result], settings: Settings, dataset: Dataset, console: Console) -> None:
    """Prints the table and writes the plots."""
    title = (
        f'{dataset.name}: {len(dataset.x_train)} images to train, {len(dataset.x_test)} to test; '
        f'{settings.steps} steps, {settings.seeds} seeds'
    )
    console.print(title, soft_wrap=True)
    console.print(make_table(results))
    plots = plot_accuracy(results, dataset.name, settings.out), plot_first_layer_masks(results, settings.out)
    console.print(f'Plots: {", ".join(map(str, plots))}', soft_wrap=True)


def make_progress(settings: Settings) -> Progress:
    """Returns the progress bar, on the error stream so that the table can be redirected alone."""
    shown = settings.progress and sys.stderr.isatty()
    console = Console(stderr=True, quiet=not shown)
    columns = TextColumn('{task.description:24}'), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not shown)


if __name__ == '__main__':
    sys.exit(main())
