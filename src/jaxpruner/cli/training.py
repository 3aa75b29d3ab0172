"""Trains what `jaxpruner run` and `jaxpruner compare` ask for, under a progress bar that Ctrl-C stops."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpruner import progress
from jaxpruner.baselines.cell_key import CellKey
from jaxpruner.baselines.mapping_choice import read_choice
from jaxpruner.baselines.recipe import Recipe, parse_override, read_recipe
from jaxpruner.baselines.sweeps import Interrupted, Sweep, plan
from jaxpruner.cli import compilation_cache, output, own_modules
from jaxpruner.cli.options import TrainingOptions
from jaxpruner.cli.workload_names import NamedWorkload, find_workload
from jaxpruner.report import experiments, figures, plots, results, tables

_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


class Outcome(NamedTuple):
    """What a sweep has left."""

    cells: list[results.Cell]  # that were asked for and have a result
    planned: int
    out: Path
    seconds: float
    is_complete: bool  # Ctrl-C did not end it


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
    own_modules.import_modules(options.modules)
    cells = plan(algorithms, sparsities, seeds)
    if options.print_recipe:
        print(_read_recipe(options, find_workload(options.workload)).to_toml(), end='')
        return 0
    outcome = train(options, cells)
    finished = outcome.cells
    out = outcome.out
    if finished:
        output.print_rich(tables.to_rich(tables.make_table(finished), output.width()))
    minutes, seconds = divmod(round(outcome.seconds), 60)
    choice = read_choice(out)
    how = f', {choice.words()}' if choice else ''
    print(
        f'{len(finished)} of {outcome.planned} cells are in {out}; '
        f'this took {minutes}:{seconds:02d} min{how}.'
    )
    if options.plots:
        print(*draw(finished, out), sep='\n')
    return exit_status(outcome)


def train(
    options: TrainingOptions, cells: Sequence[CellKey], prints_lines: bool = False
) -> Outcome:
    """Trains what has no result yet, under a progress bar; without a terminal it may print lines instead.

    Raises:
      ValueError: an option is wrong; nothing has been trained.
    """
    named = find_workload(options.workload)
    recipe = _read_recipe(options, named)
    if options.plots:
        figures.new_figure(1, 1)  # before hours of training: is matplotlib there?
    data = named.workload.data(recipe, options.data_dir)
    if options.compilation_cache:
        compilation_cache.keep_programs()
    out = options.out or Path('out') / options.workload
    began = time.perf_counter()
    training = Sweep(named.workload, recipe, data, out, options.over, options.tensorboard)
    total = len(cells) * recipe.steps
    with contextlib.ExitStack() as stack:
        is_asked_to_stop = stack.enter_context(_stop_at_interrupt())
        if prints_lines and options.progress and not progress.has_bar():
            show = progress.progress_lines(total)
        else:
            show = stack.enter_context(progress.progress_bar(total, options.progress))
        is_complete = _run(training, cells, show, is_asked_to_stop)
    seconds = time.perf_counter() - began
    return Outcome(_finished_cells(training, cells), len(cells), out, seconds, is_complete)


def exit_status(outcome: Outcome) -> int:
    """Returns 0, or 130 after Ctrl-C, of which it says how to go on."""
    if outcome.is_complete:
        return 0
    print('Interrupted; the same command goes on from there.')
    return _INTERRUPTED


def draw(cells: Sequence[results.Cell], out: Path) -> list[Path]:
    """Draws the cells and returns the files; dense models alone leave nothing to draw."""
    if all(cell.algorithm == experiments.DENSE for cell in cells):
        return []
    files = [out / 'sparsity.png', out / 'layers.png']
    plots.plot_metric_against_sparsity(cells, files[0])
    plots.plot_layer_sparsity(cells, files[1])
    return files


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


def _run(
    training: Sweep,
    cells: Sequence[CellKey],
    show: Callable[..., None],
    is_asked_to_stop: Callable[[], bool],
) -> bool:
    """Trains the cells and shows how far they are; returns whether all have finished."""
    steps = training.recipe.steps
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
