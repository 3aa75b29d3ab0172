"""`jaxpruner compare WORKLOAD`: trains a workload with many algorithms, sparsities and seeds, and prints the table."""

import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
import tyro

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.fastest import read_choice
from jaxpruner.baselines.over import Wanted
from jaxpruner.baselines.recipe import Recipe, parse_override, read_recipe
from jaxpruner.baselines.sweeps import CellKey, Interrupted, Sweep, plan
from jaxpruner.baselines.task import Workload
from jaxpruner.report import results, tables
from jaxpruner.tree import nearest

_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
# The columns of the original's table.
_ALGORITHMS = (
    'no_prune',
    'random',
    'magnitude',
    'saliency',
    'global_magnitude',
    'magnitude_ste',
    'static_sparse',
    'set',
    'rigl',
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `run` and `compare` share.

    >>> Options('vit').recipe_of(WORKLOADS['vit']).optimizer.name
    'adamw'
    """

    workload: tyro.conf.Positional[str]
    """What is trained, such as resnet, vit or lenet."""
    preset: str | None = None
    """Which recipe: default (small, needs no files), data (with --data-dir), full (the original's size); without it
    data where --data-dir is given, else default."""
    data_dir: Path | None = None
    """Folder with the data that the recipe names, such as mnist.npz."""
    recipe: Path | None = None
    """A TOML file with a whole recipe, or with what differs from the preset."""
    set: tuple[str, ...] = ()
    """Single values of the recipe, as key=value: steps=500 optimizer.learning_rate=0.05."""
    out: Path | None = None
    """Folder for the results; without it out/WORKLOAD."""
    print_recipe: bool = False
    """Print the recipe as TOML and train nothing."""
    over: Wanted | None = None
    """How the cells of an algorithm are trained: each (one after another), map (so, but in one program), vmap
    (together), devices (a share on each device); auto measures which is the fastest. Without it, as the folder was
    begun, or else as is known to be fast on this kind of device."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""

    def recipe_of(self, workload: Workload) -> Recipe:
        """The recipe of the preset with what the file and --set change.

        Args:
          workload: whose presets they are.

        Raises:
          ValueError: no such preset, or a wrong key or value.
        """
        recipe = workload.default(self.preset or ('data' if self.data_dir else 'default'))
        if self.recipe is not None:
            recipe = read_recipe(self.recipe, recipe)
        for text in self.set:
            recipe = recipe.updated(parse_override(text), f'--set {text}')
        return recipe


@dataclasses.dataclass(frozen=True)
class Compare(Options):
    """Train a workload with every algorithm at every sparsity with every seed, and print the table.

    All seeds and sparsities of an algorithm are trained by one compiled program. With the same seed every algorithm
    begins with the same weights and sees the same batches. Ctrl-C keeps what is done, and the same command goes on
    there; further algorithms, sparsities and seeds can be added later.

    Examples:
      jaxpruner compare resnet
      jaxpruner compare vit --algorithms no_prune magnitude rigl --sparsities 0.8 0.95 --seeds 0 1 2 3 4
      jaxpruner compare resnet --data-dir mnist --out out/mnist

    >>> Compare('resnet').seeds
    (0, 1, 2)
    """

    algorithms: tuple[str, ...] = _ALGORITHMS
    """Names of algorithms; no_prune is the dense model."""
    sparsities: tuple[float, ...] = (0.8,)
    """Shares of the weights to remove, in [0, 1]."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of initial weights, batches and random masks."""

    def run(self) -> int:
        """Trains, and prints the table; returns the exit status."""
        return sweep(self, self.algorithms, self.sparsities, self.seeds)


def sweep(options: Options, algorithms: Sequence[str], sparsities: Sequence[float], seeds: Sequence[int]) -> int:
    """Trains what has no result yet and prints the table.

    Args:
      options: of the command.
      algorithms: names.
      sparsities: in [0, 1].
      seeds: whole numbers.

    Returns:
      The exit status: 0, or 130 after Ctrl-C.

    Raises:
      ValueError: something cannot be meant; nothing has been trained.

    >>> import contextlib, io
    >>> with contextlib.redirect_stdout(io.StringIO()) as printed:
    ...     status = sweep(Options('vit', print_recipe=True), ['set'], [0.8], [0])
    >>> printed.getvalue().splitlines()[0]
    'workload = "vit"'
    """
    if options.workload not in WORKLOADS:
        raise ValueError(f'there is no workload {options.workload!r}; {nearest(options.workload, WORKLOADS)}')
    workload = WORKLOADS[options.workload]
    recipe, cells = options.recipe_of(workload), plan(algorithms, sparsities, seeds)
    if options.print_recipe:
        print(recipe.to_toml(), end='')
        return 0
    data = workload.data(recipe, options.data_dir)
    out = options.out or Path('out') / workload.name
    console, began = rich.console.Console(highlight=False), time.perf_counter()
    trained = Sweep(workload, recipe, data, out, options.over, options.tensorboard)
    finished = _run(trained, cells, options.progress)
    _show(trained, cells, console, time.perf_counter() - began)
    if not finished:
        console.print('Interrupted; the same command goes on from there.')
    return 0 if finished else _INTERRUPTED


def _run(trained: Sweep, cells: Sequence[CellKey], wants_progress: bool) -> bool:
    """Runs the sweep under a progress bar; the first Ctrl-C stops it after the chunk at hand, the second at once."""
    asked_to_stop: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        del frame
        asked_to_stop.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print('jaxpruner: stopping after this chunk of steps; again to stop at once', file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        with _progress_bar(wants_progress) as bar:
            steps = trained.recipe.steps
            done = dict.fromkeys(set(trained.finished()) & set(cells), steps)
            task = bar.add_task('compiling', total=len(cells) * steps, completed=sum(done.values()))

            def on_chunk(group: Sequence[CellKey], step: int) -> None:
                done.update(dict.fromkeys(group, step))
                bar.update(task, description=group[0].algorithm, completed=sum(done.values()))

            trained.run(cells, on_chunk, lambda: bool(asked_to_stop))
    except (Interrupted, KeyboardInterrupt):
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True


def _show(trained: Sweep, cells: Sequence[CellKey], console: rich.console.Console, seconds: float) -> None:
    """Prints the table of the cells that have finished."""
    done = set(trained.finished()) & set(cells)
    if done:
        found = [cell for cell in results.read_cells(trained.out) if CellKey(*_key(cell)) in done]
        console.print(tables.to_rich(tables.make_table(found), console.width))
    minutes, left = divmod(round(seconds), 60)
    choice = read_choice(trained.out)
    how = f', {choice.words()}' if choice else ''
    console.print(
        f'{len(done)} of {len(cells)} cells are in {trained.out}; this took {minutes}:{left:02d} min{how}.',
        soft_wrap=True,
    )


def _key(cell: results.Cell) -> tuple[str, float, int]:
    return cell.algorithm, float(cell.sparsity), cell.seed


def _progress_bar(wanted: bool) -> rich.progress.Progress:
    """On the error stream, so that the table can be redirected alone."""
    shown = wanted and sys.stderr.isatty()
    columns = (
        rich.progress.TextColumn('{task.description:16}'),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True, quiet=not shown)
    return rich.progress.Progress(*columns, console=console, transient=True, disable=not shown)
