"""`jaxpruner run`, `compare` and `demo`: training under a progress bar that Ctrl-C stops."""

import contextlib
import dataclasses
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache
from tyro.conf import Positional, arg

from jaxpruner import progress, report
from jaxpruner.caller_warnings import warn
from jaxpruner.cli import options
from jaxpruner.files.atomic_files import locked
from jaxpruner.report import figures, tables
from jaxpruner.report.experiments import ALGORITHM_ORDER, DENSE
from jaxpruner.tree import nearest

if TYPE_CHECKING:
    from jaxpruner.baselines.recipe import Recipe
    from jaxpruner.baselines.task import Workload

# What the demo trains, and how it prunes.
DEMO_ALGORITHMS = {
    DENSE: 'prunes nothing',
    'random': 'prunes any weights',
    'magnitude': 'the smallest of each layer',
    'global_magnitude': 'the smallest of all layers',
    'magnitude_ste': 'the smallest, in the forward pass alone',
    'set': 'sparse from the start, grows weights at random',
    'rigl': 'sparse from the start, grows weights by gradients',
}


@dataclasses.dataclass(frozen=True)
class Training:
    """What to train, with which data and settings, and where the results go."""

    workload: Annotated[str, Positional, arg(metavar='WORKLOAD')]
    """resnet, vit, lenet, federated, t5 or dqn; or with data before it, as in digits-resnet or mnist-vit."""
    preset: str | None = None
    """Such as default (small, needs no files), data (the default with --data-dir) or full (the original's size)."""
    data_dir: Path | None = None
    """Folder with the data that the recipe names, such as mnist.npz."""
    recipe: Path | None = None
    """A TOML file with a whole recipe, or with what differs from the preset."""
    set: options.Values = ()
    """Single values of the recipe, such as steps=500 optimizer.learning_rate=0.05."""
    out: Path | None = None
    """Folder for the results; without it out/WORKLOAD."""
    modules: options.Values = ()
    """Your own modules, imported first, such as mine for mine.py here; they may register algorithms and types."""
    print_recipe: bool = False
    """Print the recipe as TOML and train nothing."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    plots: bool = False
    """Also draw sparsity.png and layers.png into the folder; `jaxpruner plot` draws more."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""
    compilation_cache: bool = True
    """Keep compiled programs in your cache folder, at most 1 GiB; JAX_COMPILATION_CACHE_DIR names another folder."""


def run(
    training: Annotated[Training, arg(name='')],
    *,
    algorithm: str = 'magnitude',
    sparsity: float = 0.8,
    seed: int = 0,
) -> int:
    """Train one model of a workload with one algorithm, sparsity and seed.

    The same command goes on where an interrupted one stopped; what has finished is not run again.

    Args:
      training: what to train.
      algorithm: name of the algorithm; no_prune trains the dense model.
      sparsity: share of the weights to remove, in [0, 1].
      seed: of initial weights, batches and random masks.
    """
    return compare(training, algorithms=(algorithm,), sparsities=(sparsity,), seeds=(seed,))


def compare(
    training: Annotated[Training, arg(name='')],
    *,
    algorithms: tuple[str, ...] = ALGORITHM_ORDER,
    sparsities: tuple[float, ...] = (0.8,),
    seeds: tuple[int, ...] = (0, 1, 2),
) -> int:
    """Train a workload with every algorithm at every sparsity with every seed, and print the table.

    Ctrl-C keeps what is done, and the same command goes on there; more can be added later.

    Args:
      training: what to train.
      algorithms: names of algorithms; no_prune is the dense model.
      sparsities: shares of the weights to remove, in [0, 1].
      seeds: of initial weights, batches and random masks.
    """
    if training.print_recipe:
        print(_recipe(training)[1].to_toml(), end='')
        return 0
    return _sweep(training, algorithms, sparsities, seeds)


def demo(*, out: Path = Path('out/demo'), set: options.Values = (), progress: bool = True) -> int:
    """Train a small network dense and pruned by six algorithms, and explain what came out.

    It takes about a minute and a half on two cores. Ctrl-C keeps what is done, and the same command goes on there.

    Args:
      out: folder for the results.
      set: single values of the recipe, such as steps=20, with which nothing is learned.
      progress: show a progress bar if stderr is a terminal.
    """
    sparsities, seeds = (0.8, 0.95), (0, 1, 2)
    pruned = len(DEMO_ALGORITHMS) - 1
    announcement = (
        f'Trains LeNet-300-100 on handwritten digits: dense, and with 80% and 95% of its weights pruned by {pruned} '
        f'algorithms. {len(seeds) * (1 + pruned * len(sparsities))} networks take about a minute and a half on two '
        f'cores. One of the 450 test images is {100 / 450:.2f}%. Results go to {out}; what is there is not trained '
        'again.'
    )
    print(f'{textwrap.fill(announcement, _width())}\n', flush=True)
    training = Training('digits-lenet', out=out, set=set, plots=True, progress=progress)
    status = _sweep(training, tuple(DEMO_ALGORITHMS), sparsities, seeds, DEMO_ALGORITHMS)
    if not status:
        print('`jaxpruner compare digits-resnet --plots` does this with another network.')
    return status


def _width() -> int:
    return shutil.get_terminal_size().columns


def _sweep(
    training: Training,
    algorithms: Sequence[str],
    sparsities: Sequence[float],
    seeds: Sequence[int],
    remarks: Mapping[str, str] | None = None,
) -> int:
    """Trains what has no result yet, prints the table, and returns the exit status: 0, or 130 after Ctrl-C.

    Whatever is wrong is refused before anything is trained. `remarks` are words about algorithms for the table.
    """
    workload, recipe = _recipe(training)
    from jaxpruner.baselines import sweeps

    planned = sweeps.plan(algorithms, sparsities, seeds)
    if training.plots:
        figures.new_figure(1, 1)  # before hours of training: is matplotlib there?
    if training.compilation_cache:
        _keep_programs()  # before anything is compiled
    data = workload.data(recipe, training.data_dir)
    out = training.out or Path('out') / training.workload
    sweep = sweeps.Sweep(workload, recipe, data, out, training.tensorboard)
    steps = dict.fromkeys(set(sweep.finished()) & set(planned), recipe.steps)
    began = time.perf_counter()
    interrupts: list[int] = []

    def on_interrupt(number: int, frame: Any) -> None:
        """The first Ctrl-C stops after the chunk at hand, the second at once."""
        del frame
        interrupts.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        words = 'jaxpruner: stopping after this chunk of steps; again to stop at once'
        print(words, file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_interrupt)
    with (
        contextlib.suppress(sweeps.Interrupted, KeyboardInterrupt),
        progress.progress_bar(len(planned) * recipe.steps, training.progress) as show,
    ):

        def on_chunk(group: Sequence[Any], step: int) -> None:
            steps.update(dict.fromkeys(group, step))
            show(group[0].algorithm, sum(steps.values()))

        show('compiling', sum(steps.values()))
        try:
            sweep.run(planned, on_chunk, lambda: bool(interrupts))
        finally:
            signal.signal(signal.SIGINT, before)
    names = {cell.name for cell in set(sweep.finished()) & set(planned)}
    cells = [cell for cell in report.read_cells(out) if cell.name in names] if names else []
    if cells:
        print(f'{report.to_text(cells, _width(), remarks)}\n')
        print(f'{textwrap.fill(tables.MARKS_EXPLAINED, _width())}\n')
    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    done = f'{len(cells)} of {len(planned)} cells are in {out}'
    print(f'{done}; this took {minutes}:{seconds:02d} min.')
    if training.plots and any(cell.algorithm != DENSE for cell in cells):
        report.plot_metric_against_sparsity(cells, out / 'sparsity.png')
        report.plot_layer_sparsity(cells, out / 'layers.png')
        print(out / 'sparsity.png', out / 'layers.png', sep='\n')
    if len(cells) == len(planned):
        return 0
    print('Interrupted; the same command goes on from there.')
    return 130  # as a shell reports it


def _recipe(training: Training) -> 'tuple[Workload, Recipe]':
    """Finds the workload, by its name or with data before it as in mnist-vit, and reads its recipe."""
    options.import_modules(training.modules)
    from jaxpruner.baselines import WORKLOADS
    from jaxpruner.baselines.recipe import parse_override, read_recipe

    named: dict[str, tuple[Workload, str | None, str | None]] = {}
    named |= {workload.name: (workload, None, None) for workload in WORKLOADS.values()}
    for workload in WORKLOADS.values():
        for preset in workload.presets:
            data = workload.default(preset).data
            named.setdefault(f'{data}-{workload.name}', (workload, data, preset))
    name = training.workload
    if name not in named:
        raise ValueError(f'there is no workload {name!r}; {nearest(name, named)}')
    workload, data, preset = named[name]
    preset = training.preset or preset or ('data' if training.data_dir else 'default')
    recipe = workload.default(preset)
    if training.recipe is not None:
        recipe = read_recipe(training.recipe, recipe)
    for text in options.flat(training.set):
        recipe = recipe.updated(parse_override(text), f'--set {text}')
    if data not in (None, recipe.data):
        raise ValueError(
            f'{name} trains on {data}, but --preset, --recipe or --set ask for {recipe.data}: leave them out, or say '
            f'{workload.name}'
        )
    return workload, recipe


def _keep_programs() -> None:
    """Turns JAX's compilation cache on, unless the user has named a folder for it or turned it off."""
    config: Any = jax.config  # its names are made as JAX is loaded
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    folder = platformdirs.user_cache_path('jaxpruner', appauthor=False) / 'compiled'
    try:
        # Whoever can write there can run code as this user.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # JAX writes a program, and then, to a second file, when it was used. What a full disk or a killed process left
        # has no second file, and would crash the process that loads it.
        with contextlib.suppress(BlockingIOError), locked(folder / '.lockfile', folder):
            for program in folder.glob('*-cache'):
                if not program.with_name(program.name.removesuffix('cache') + 'atime').exists():
                    program.unlink(missing_ok=True)
    except OSError as error:
        warn(f'compiled programs are not kept: {error}; --no-compilation-cache says so, too')
        return
    config.update('jax_compilation_cache_dir', str(folder))
    config.update('jax_compilation_cache_max_size', 1 << 30)
    config.update('jax_persistent_cache_min_compile_time_secs', 0.1)  # a second leaves most out
    compilation_cache.reset_cache()  # JAX may have compiled something and found no folder
