"""`jaxpruner run`, `compare` and `demo`: training under a progress bar."""

import contextlib
import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from jaxpruner import progress, report
from jaxpruner.cli import options
from jaxpruner.report import figures, tables
from jaxpruner.report.experiments import ALGORITHM_ORDER, DENSE
from jaxpruner.tree import nearest

if TYPE_CHECKING:
    from jaxpruner.baselines.recipe import Recipe
    from jaxpruner.baselines.task import Workload

DEMO_ALGORITHMS = (DENSE, 'random', 'magnitude', 'global_magnitude', 'magnitude_ste', 'set', 'rigl')


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

    Ctrl-C keeps what is done, and the same command goes on there; more can be added later. The table shows all results
    in the folder, those of earlier commands, too.

    Args:
      training: what to train.
      algorithms: names of algorithms; no_prune is the dense model.
      sparsities: shares of the weights to remove, in [0, 1].
      seeds: of initial weights, batches and random masks.
    """
    # Whatever is wrong is refused before anything is trained.
    workload, recipe = _recipe(training)
    if training.print_recipe:
        print(recipe.to_toml(), end='')
        return 0
    from jaxpruner.baselines import sweeps

    planned = sweeps.plan(algorithms, sparsities, seeds)
    data = workload.data(recipe, training.data_dir)
    out = training.out or Path('out') / training.workload
    sweep = sweeps.Sweep(workload, recipe, data, out, training.tensorboard)
    steps = dict.fromkeys(set(sweep.finished()) & set(planned), recipe.steps)
    with (
        contextlib.suppress(KeyboardInterrupt),
        progress.progress_bar(len(planned) * recipe.steps) as show,
    ):

        def on_chunk(group: Sequence[Any], step: int) -> None:
            steps.update(dict.fromkeys(group, step))
            show(group[0].algorithm, sum(steps.values()))

        show('compiling', sum(steps.values()))
        sweep.run(planned, on_chunk)
    finished = sweep.finished()
    if finished:
        width = shutil.get_terminal_size().columns
        print(f'{report.to_text(report.read_cells(out), width)}\n')
        print(f'{textwrap.fill(tables.MARKS_EXPLAINED, width)}\n')
    done = len(set(finished) & set(planned))
    print(f'{done} of {len(planned)} cells are in {out}')
    if done == len(planned):
        return 0
    print('Interrupted; the same command goes on from there.')
    return 130  # as a shell reports it


def demo(*, out: Path = Path('out/demo'), set: options.Values = ()) -> int:
    """Train a small network dense and pruned by six algorithms, and explain what came out.

    It takes about a minute and a half on two cores. Ctrl-C keeps what is done, and the same command goes on there.

    Args:
      out: folder for the results.
      set: single values of the recipe, such as steps=20, with which nothing is learned.
    """
    figures.new_figure(1, 1)  # before the training: is matplotlib there?
    announcement = (
        'Trains LeNet-300-100 on handwritten digits: dense, and with 80% and 95% of its weights pruned by six '
        'algorithms. 39 networks take about a minute and a half on two cores. One of the 450 test images is 0.22%. '
        f'Results go to {out}; what is there is not trained again.'
    )
    print(f'{textwrap.fill(announcement, shutil.get_terminal_size().columns)}\n', flush=True)
    training = Training('digits-lenet', out=out, set=set)
    status = compare(training, algorithms=DEMO_ALGORITHMS, sparsities=(0.8, 0.95))
    if not status:
        cells = report.read_cells(out)
        report.plot_metric_against_sparsity(cells, out / 'sparsity.png')
        report.plot_layer_sparsity(cells, out / 'layers.png')
        print(out / 'sparsity.png', out / 'layers.png', sep='\n')
        print('`jaxpruner compare digits-resnet` does this with another network.')
    return status


def _recipe(training: Training) -> 'tuple[Workload, Recipe]':
    """Finds the workload, by its name or with data before it as in mnist-vit, and reads its recipe."""
    options.import_modules(training.modules)
    from jaxpruner.baselines import WORKLOADS
    from jaxpruner.baselines.recipe import parse_override, read_recipe

    name = training.workload
    data, _, own_name = name.rpartition('-')
    workload = WORKLOADS.get(own_name)
    fitting: list[str] = []
    if workload:
        presets = workload.presets
        fitting = [preset for preset in presets if data in ('', workload.default(preset).data)]
    if workload is None or not fitting:
        raise ValueError(f'there is no workload {name!r}; {nearest(name, WORKLOADS)}')
    usual = 'data' if training.data_dir else 'default'
    preset = training.preset or (fitting[0] if data else usual)
    recipe = workload.default(preset)
    if training.recipe is not None:
        recipe = read_recipe(training.recipe, recipe)
    for text in options.flat(training.set):
        recipe = recipe.updated(parse_override(text), f'--set {text}')
    if data not in ('', recipe.data):
        raise ValueError(
            f'{name} trains on {data}, but --preset, --recipe or --set ask for {recipe.data}: leave them out, or say '
            f'{workload.name}'
        )
    return workload, recipe
