"""`jaxpruner compare WORKLOAD`: trains a workload with many algorithms, sparsities and seeds, and prints the table."""

import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpruner.cli import arguments, output
from jaxpruner.core.progress import progress_bar
from jaxpruner.report import experiments, figures, plots, results, tables

if (
    TYPE_CHECKING
):  # loaded where they are used: flax and orbax take seconds, which --help need not wait for
    from jaxpruner.baselines.recipe import Recipe
    from jaxpruner.baselines.sweeps import CellKey, Sweep
    from jaxpruner.cli.workload_names import Named

Over = Literal['auto', 'each', 'map', 'vmap', 'devices']  # as `cell_mapping.RequestedMapping`

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

    >>> Options('vit', preset='full').preset
    'full'
    """

    workload: arguments.WorkloadName
    """resnet, vit, lenet, federated, t5 or dqn; or with data before it, as in digits-resnet or mnist-vit."""
    preset: arguments.OptionalName = None
    """Such as default (small, needs no files), data (the default with --data-dir) or full (the original's size)."""
    data_dir: arguments.OptionalPath = None
    """Folder with the data that the recipe names, such as mnist.npz."""
    recipe: arguments.OptionalPath = None
    """A TOML file with a whole recipe, or with what differs from the preset."""
    set: arguments.Settings = ()
    """Single values of the recipe, such as steps=500 optimizer.learning_rate=0.05."""
    out: arguments.OptionalPath = None
    """Folder for the results; without it out/WORKLOAD."""
    print_recipe: bool = False
    """Print the recipe as TOML and train nothing."""
    over: Over | None = None
    """How the cells of an algorithm are trained: each (one after another), map (so, but in one program), vmap
    (together), devices (a share on each device); auto measures which is the fastest. Without it, as the folder was
    begun, or else as is known to be fast on this kind of device."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    plots: bool = False
    """Also draw sparsity.png and layers.png into the folder; `jaxpruner plot` draws more."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""

    def recipe_of(self, named: 'Named') -> 'Recipe':
        """The recipe of the preset with what the file and --set change.

        Args:
          named: what WORKLOAD means.

        Raises:
          ValueError: no such preset, a wrong key or value, or other data than those that WORKLOAD names.
        """
        from jaxpruner.baselines.recipe import read_recipe

        recipe = named.workload.default(
            self.preset or named.preset or ('data' if self.data_dir else 'default')
        )
        if self.recipe is not None:
            recipe = read_recipe(self.recipe, recipe)
        for text in self.set:
            recipe = recipe.updated(_override(text), f'--set {text}')
        if named.data not in (None, recipe.data):
            raise ValueError(
                f'{self.workload} trains on {named.data}, but --preset, --recipe or --set ask for {recipe.data}: '
                f'leave them out, or say {named.workload.name}'
            )
        return recipe


@dataclasses.dataclass(frozen=True)
class Compare(Options):
    """Train a workload with every algorithm at every sparsity with every seed, and print the table.

    All seeds and sparsities of an algorithm are trained by one compiled program. With the same seed every algorithm
    begins with the same weights and sees the same batches. Ctrl-C keeps what is done, and the same command goes on
    there; further algorithms, sparsities and seeds can be added later.

    Examples:
      jaxpruner compare digits-resnet --plots
      jaxpruner compare vit --algorithms no_prune rigl --sparsities 0.8 0.95
      jaxpruner compare mnist-resnet --data-dir mnist

    >>> Compare('resnet').seeds
    (0, 1, 2)
    """

    algorithms: arguments.Names = _ALGORITHMS
    """Names of algorithms; no_prune is the dense model."""
    sparsities: arguments.Shares = (0.8,)
    """Shares of the weights to remove, in [0, 1]."""
    seeds: arguments.Numbers = (0, 1, 2)
    """Of initial weights, batches and random masks."""

    def run(self) -> int:
        """Trains, and prints the table; returns the exit status."""
        return sweep(self, self.algorithms, self.sparsities, self.seeds)


def _override(text: str) -> dict[str, Any]:
    from jaxpruner.baselines.recipe import parse_override

    try:
        return parse_override(text)
    except ValueError as error:
        raise ValueError(f'--set: {error}') from None


def sweep(
    options: Options, algorithms: Sequence[str], sparsities: Sequence[float], seeds: Sequence[int]
) -> int:
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
    from jaxpruner.baselines.sweeps import Sweep, plan
    from jaxpruner.cli.workload_names import find_workload

    named = find_workload(options.workload)
    workload, recipe, cells = (
        named.workload,
        options.recipe_of(named),
        plan(algorithms, sparsities, seeds),
    )
    if options.print_recipe:
        print(recipe.to_toml(), end='')
        return 0
    if options.plots:
        figures.new_figure(1, 1)  # before hours of training: is matplotlib there?
    data = workload.data(recipe, options.data_dir)
    out = options.out or Path('out') / options.workload
    began = time.perf_counter()
    trained = Sweep(workload, recipe, data, out, options.over, options.tensorboard)
    finished = _run(trained, cells, options.progress)
    _show(trained, cells, options.plots, time.perf_counter() - began)
    if not finished:
        print('Interrupted; the same command goes on from there.')
    return 0 if finished else _INTERRUPTED


def _run(trained: 'Sweep', cells: 'Sequence[CellKey]', wants_progress: bool) -> bool:
    """Runs the sweep under a progress bar; the first Ctrl-C stops it after the chunk at hand, the second at once."""
    from jaxpruner.baselines.sweeps import Interrupted

    asked_to_stop: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        del frame
        asked_to_stop.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(
            'jaxpruner: stopping after this chunk of steps; again to stop at once', file=sys.stderr
        )

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        steps = trained.recipe.steps
        with progress_bar(len(cells) * steps, wants_progress) as show:
            done = dict.fromkeys(set(trained.finished()) & set(cells), steps)
            show('compiling', sum(done.values()))

            def on_chunk(group: 'Sequence[CellKey]', step: int) -> None:
                done.update(dict.fromkeys(group, step))
                show(group[0].algorithm, sum(done.values()))

            trained.run(cells, on_chunk, lambda: bool(asked_to_stop))
    except (Interrupted, KeyboardInterrupt):
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True


def _show(trained: 'Sweep', cells: 'Sequence[CellKey]', wants_plots: bool, seconds: float) -> None:
    """Prints the table of the cells that have finished, and draws them."""
    from jaxpruner.baselines.mapping_choice import read_choice

    names = {cell.name for cell in set(trained.finished()) & set(cells)}
    found = (
        [cell for cell in results.read_cells(trained.out) if cell.name in names] if names else []
    )
    if found:
        output.print_rich(tables.to_rich(tables.make_table(found), output.width()))
    minutes, left = divmod(round(seconds), 60)
    choice = read_choice(trained.out)
    how = f', {choice.words()}' if choice else ''
    print(
        f'{len(found)} of {len(cells)} cells are in {trained.out}; this took {minutes}:{left:02d} min{how}.'
    )
    if wants_plots:
        for path in _draw(found, trained.out):
            print(path)


def _draw(cells: Sequence[results.Cell], out: Path) -> list[Path]:
    """Draws what can be: of dense models there is nothing to be seen."""
    if all(cell.algorithm == experiments.DENSE for cell in cells):
        return []
    drawings = {
        'sparsity.png': plots.plot_metric_against_sparsity,
        'layers.png': plots.plot_layer_sparsity,
    }
    for name, draw in drawings.items():
        draw(cells, out / name)
    return [out / name for name in drawings]
