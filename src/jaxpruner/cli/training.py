"""Trains what `jaxpruner run` and `jaxpruner compare` ask for, under a progress bar that Ctrl-C stops."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpruner.baselines.mapping_choice import read_choice
from jaxpruner.baselines.recipe import Recipe, parse_override, read_recipe
from jaxpruner.baselines.sweeps import CellKey, Interrupted, Sweep, plan
from jaxpruner.cli import compilation_cache, output
from jaxpruner.cli.options import TrainingOptions
from jaxpruner.cli.workload_names import NamedWorkload, find_workload
from jaxpruner.core.progress import progress_bar
from jaxpruner.report import experiments, figures, plots, results, tables

_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


def sweep(
    options: TrainingOptions,
    algorithms: Sequence[str],
    sparsities: Sequence[float],
    seeds: Sequence[int],
) -> int:
    """Trains what has no result yet, prints the table, and returns the exit status: 0, or 130 after Ctrl-C.

    Raises:
      ValueError: an option is wrong; nothing has been trained.
    """
    named = find_workload(options.workload)
    recipe = _read_recipe(options, named)
    cells = plan(algorithms, sparsities, seeds)
    if options.print_recipe:
        print(recipe.to_toml(), end='')
        return 0
    if options.plots:
        figures.new_figure(1, 1)  # before hours of training: is matplotlib there?
    data = named.workload.data(recipe, options.data_dir)
    if options.compilation_cache:
        compilation_cache.keep_programs()
    out = options.out or Path('out') / options.workload
    began = time.perf_counter()
    training = Sweep(named.workload, recipe, data, out, options.over, options.tensorboard)
    has_finished = _run(training, cells, options.progress)
    seconds = time.perf_counter() - began
    finished = _finished_cells(training, cells)
    if finished:
        output.print_rich(tables.to_rich(tables.make_table(finished), output.width()))
    minutes, seconds = divmod(round(seconds), 60)
    choice = read_choice(out)
    how = f', {choice.words()}' if choice else ''
    print(
        f'{len(finished)} of {len(cells)} cells are in {out}; this took {minutes}:{seconds:02d} min{how}.'
    )
    if options.plots:
        _draw(finished, out)
    if not has_finished:
        print('Interrupted; the same command goes on from there.')
        return _INTERRUPTED
    return 0


def _read_recipe(options: TrainingOptions, named: NamedWorkload) -> Recipe:
    """Reads the recipe of the preset, with what the file and --set change."""
    preset = options.preset or named.preset or ('data' if options.data_dir else 'default')
    recipe = named.workload.default(preset)
    if options.recipe is not None:
        recipe = read_recipe(options.recipe, recipe)
    for text in options.set:
        try:
            override = parse_override(text)
        except ValueError as error:
            raise ValueError(f'--set: {error}') from None
        recipe = recipe.updated(override, f'--set {text}')
    if named.data not in (None, recipe.data):
        raise ValueError(
            f'{options.workload} trains on {named.data}, but --preset, --recipe or --set ask for {recipe.data}: '
            f'leave them out, or say {named.workload.name}'
        )
    return recipe


def _run(training: Sweep, cells: Sequence[CellKey], shows_progress: bool) -> bool:
    """Trains the cells under a progress bar; returns whether all have finished."""
    steps = training.recipe.steps
    with (
        _stop_at_interrupt() as is_asked_to_stop,
        progress_bar(len(cells) * steps, shows_progress) as show,
    ):
        steps_done = dict.fromkeys(set(training.finished()) & set(cells), steps)
        show('compiling', sum(steps_done.values()))

        def on_chunk(group: Sequence[CellKey], step: int) -> None:
            steps_done.update(dict.fromkeys(group, step))
            show(group[0].algorithm, sum(steps_done.values()))

        try:
            training.run(cells, on_chunk, is_asked_to_stop)
        except (Interrupted, KeyboardInterrupt):
            return False
    return True


@contextlib.contextmanager
def _stop_at_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed: the first stops after the chunk at hand, the second at once."""
    signals: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        del frame
        signals.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(
            'jaxpruner: stopping after this chunk of steps; again to stop at once', file=sys.stderr
        )

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGINT, before)


def _finished_cells(training: Sweep, cells: Sequence[CellKey]) -> list[results.Cell]:
    names = {cell.name for cell in set(training.finished()) & set(cells)}
    if not names:
        return []
    return [cell for cell in results.read_cells(training.out) if cell.name in names]


def _draw(cells: Sequence[results.Cell], out: Path) -> None:
    """Draws the cells and prints the files; dense models alone leave nothing to draw."""
    if all(cell.algorithm == experiments.DENSE for cell in cells):
        return
    plots.plot_metric_against_sparsity(cells, out / 'sparsity.png')
    plots.plot_layer_sparsity(cells, out / 'layers.png')
    print(out / 'sparsity.png', out / 'layers.png', sep='\n')
