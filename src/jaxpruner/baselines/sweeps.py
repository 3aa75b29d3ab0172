"""Sweeps: every algorithm at every sparsity with every seed, one compiled program per algorithm.

Results go to a folder, one file for each finished cell, with one process that writes at a time. A sweep that was
interrupted or killed goes on at its last checkpoint; finished cells are not run again.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpruner.baselines.checkpointing import (
    CellKey,
    Checkpoints,
    Masks,
    Progress,
    with_snapshot,
    write_logs,
)
from jaxpruner.baselines.programs import (
    CellMapping,
    CompiledTraining,
    FeedTraining,
    SharedPrograms,
    check_mapping,
)
from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.baselines.task import Workload
from jaxpruner.baselines.training import DENSE, Training, check_algorithm
from jaxpruner.files import atomic_files
from jaxpruner.files.atomic_files import locked
from jaxpruner.files.system_errors import errors_named
from jaxpruner.report.results import Cell, read_cells, write_cell
from jaxpruner.sparsity_distributions import check_sparsity

_RECIPE = 'recipe.toml'


@contextlib.contextmanager
def claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Keeps other processes and other recipes from writing to a folder of results.

    The folder is made where it is missing. The file `.lock` in it names the process that writes;
    the system releases the lock when that process ends, however it ends. A `ValueError` names what
    is in the way.
    """
    with contextlib.ExitStack() as stack:
        with errors_named(out):
            out.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(out / '.lock', out))
            except BlockingIOError as error:
                raise ValueError(f'{error}, to another --out') from None
        for folder in ('cells', 'masks'):
            atomic_files.remove_strays(out / folder)
        path = out / _RECIPE
        if path.exists() and _has_begun(out) and (existing := read_recipe(path, recipe)) != recipe:
            texts = (recipe.to_toml().splitlines(), existing.to_toml().splitlines())
            different = (pair for pair in zip(*texts, strict=False) if pair[0] != pair[1])
            new_line, old_line = next(different, ('', ''))
            raise ValueError(
                f'{path} is another recipe ({old_line!r} there, {new_line!r} now); its results cannot be continued: '
                'choose another --out, or the same recipe'
            )
        yield


def keep_recipe(out: Path, recipe: Recipe) -> None:
    """Writes the recipe of a claimed folder, in which no cell has begun with another one."""
    if not ((out / _RECIPE).exists() and _has_begun(out)):
        recipe.write(out / _RECIPE)


def _has_begun(out: Path) -> bool:
    """Whether a cell has a result or a checkpoint."""
    return any(out.glob('cells/*.json')) or any(out.glob('checkpoints/*/*'))


class Interrupted(Exception):
    """The sweep was asked to stop; what is done is in its checkpoint."""


def plan(
    algorithms: Sequence[str], sparsities: Sequence[float], seeds: Sequence[int]
) -> list[CellKey]:
    """The cells of a comparison: the product, each once; the dense model has no sparsity.

    Raises a `ValueError` for an unknown algorithm, a sparsity outside [0, 1] or a negative seed.

    >>> [cell.name for cell in plan(['no_prune', 'set'], [0.8, 0.9], [0])]
    ['no_prune_0.0_0', 'set_0.8_0', 'set_0.9_0']
    """
    for algorithm in algorithms:
        check_algorithm(algorithm)
    for sparsity in sparsities:
        check_sparsity(sparsity, 'sparsity')
    for seed in seeds:
        if not 0 <= seed < 2**31:
            raise ValueError(f'a seed must be a whole number from 0 to {2**31 - 1}, got {seed}')
    cells: dict[CellKey, None] = {}
    for algorithm, sparsity, seed in itertools.product(algorithms, sparsities, seeds):
        own_sparsity = 0.0 if algorithm == DENSE else float(sparsity)
        cells[CellKey(algorithm, own_sparsity, seed)] = None
    return list(cells)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Trains cells and writes their results to a folder.

    >>> import tempfile
    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sweep = Sweep(workload, recipe, workload.data(recipe, None), Path(folder))
    ...     sweep.run(plan(['random'], [0.5], [0, 1]))
    ...     [cell.name for cell in read_cells(Path(folder))]
    ['random_0.5_0', 'random_0.5_1']
    """

    workload: Workload
    recipe: Recipe
    data: Any  # of the workload
    out: Path  # made when it is missing
    mapping: CellMapping | None = None  # how cells are trained together: `--over`
    tensorboard: bool = False  # also write event files

    def finished(self) -> list[CellKey]:
        """The cells whose results are in the folder; a damaged result is renamed, to be run again."""
        if not any(self.out.glob('cells/*.json')):
            return []
        cells = read_cells(self.out, set_aside=True)
        return [CellKey(cell.algorithm, cell.sparsity, cell.seed) for cell in cells]

    def run(
        self,
        cells: Sequence[CellKey],
        on_chunk: Callable[[Sequence[CellKey], int], None] = lambda group, step: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains the cells that have no result yet.

        After each chunk of steps `on_chunk` gets the cells that are trained together and the step,
        and `should_stop` is asked.

        Raises:
          Interrupted: `should_stop` said so.
          ValueError: the folder holds results of another recipe, another process writes there, or
            the cell mapping does not exist here; the recipe is wrong for one of the algorithms, of
            which none has been trained then.
        """
        with claimed(self.out, self.recipe):
            if not (pending := self._pending(cells)):
                return
            self._check(pending)
            keep_recipe(self.out, self.recipe)
            settings = self.workload, self.recipe, self.data
            if self.workload.task(self.recipe, self.data).feed is not None:
                if self.mapping not in ('each', None):
                    raise ValueError(
                        f'over {self.mapping!r}: batches of {self.recipe.data} come from the host, so that cells are '
                        "trained one after another; leave it out, or say 'each'"
                    )
                mapping, training_of = 'each', functools.partial(FeedTraining, *settings)
            else:
                # On a CPU cells that train together are no faster.
                mapping = self.mapping or ('map' if jax.default_backend() == 'cpu' else 'vmap')
                check_mapping(mapping)
                programs = SharedPrograms(*settings, mapping)
                training_of = functools.partial(CompiledTraining, programs)
            training, algorithm = None, ''
            while pending:
                # The cells to train together next: those of a checkpoint, or else all of an algorithm.
                group = [cell for cell in pending if cell.algorithm == pending[0].algorithm]
                begun = None
                for progress in self._checkpoints().begun():
                    if unfinished := [cell for cell in progress.cells if cell in pending]:
                        group, begun = unfinished, progress
                        break
                if mapping == 'each':
                    group = group[:1]
                if training is None or algorithm != group[0].algorithm:
                    algorithm = group[0].algorithm
                    training = training_of(algorithm)
                try:
                    self._run_group(training, group, begun, on_chunk, should_stop)
                finally:
                    training.close()
                pending = self._pending(cells)
                if should_stop():
                    raise Interrupted(f'stopped after {algorithm}')

    def _check(self, pending: Sequence[CellKey]) -> None:
        """Traces how each algorithm begins, which refuses a wrong recipe before hours of training."""
        dense = Training(self.workload, self.recipe, DENSE)
        shapes = jax.eval_shape(lambda: dense.init(self.data, 0))
        for algorithm, sparsity in {cell.algorithm: cell.sparsity for cell in pending}.items():
            training = Training(self.workload, self.recipe, algorithm)
            targets = training.targets(self.data, sparsity)
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # they come when it is trained
                jax.eval_shape(functools.partial(training.start, targets, 0), *shapes)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.out / 'checkpoints', self.recipe.digest())

    def _pending(self, cells: Sequence[CellKey]) -> list[CellKey]:
        """The cells without a result; checkpoints of the others are removed."""
        finished = set(self.finished())
        self._checkpoints().clear(finished)
        return [cell for cell in cells if cell not in finished]

    def _run_group(
        self,
        training: CompiledTraining | FeedTraining,
        group: list[CellKey],
        begun: Progress | None,
        on_chunk: Callable,
        should_stop: Callable,
    ) -> None:
        """Trains cells of one algorithm to the end, from their checkpoint if there is one."""
        checkpoints = self._checkpoints()
        seeds = [cell.seed for cell in group]
        targets = training.targets([cell.sparsity for cell in group])
        began = time.perf_counter()
        feed = training.open(seeds)
        restored = None
        if begun:
            like = jax.eval_shape(lambda: training.start(targets, seeds))
            restored = checkpoints.restore(begun, group, like, feed)
            if restored is None:  # the feed may be restored in part
                feed = training.open(seeds)
        if restored is None:
            carries = training.start(targets, seeds)
            snapshots = with_snapshot({}, training.masks(carries))
            progress = Progress(list(group), 0, snapshots=snapshots)
        else:
            progress, carries = restored
        masks = training.masks(carries)
        began -= progress.seconds
        # After each chunk of steps everything is evaluated and saved.
        chunks = max(1, min(self.recipe.steps, round(1 / self.recipe.eval_every)))
        for stop in np.linspace(0, self.recipe.steps, chunks + 1).round().astype(int).tolist():
            if stop <= progress.step:
                continue
            carries = training.advance(targets, carries, progress.step, stop)
            metrics, masks = training.report(targets, carries)
            seconds = time.perf_counter() - began
            progress = progress.advanced(stop, seconds, metrics, masks)
            checkpoints.save(progress, carries, feed)
            on_chunk(group, stop)
            if stop < self.recipe.steps and should_stop():
                raise Interrupted(f'stopped after step {stop} of {group[0].algorithm}')
        self._write(group, progress, masks, training.prunable())

    def _write(
        self, group: list[CellKey], progress: Progress, masks: Masks, sizes: dict[str, int]
    ) -> None:
        """Writes the results of finished cells; a cell's own file is the last, after its logs."""
        metric = self.workload.task(self.recipe, self.data).metric
        for number, key in enumerate(group):
            own = progress.of_cells([number])
            write_logs(self.out, key.name, own, self.tensorboard)
            zeros = {
                path: int((masks[path][number] == 0).sum()) if path in masks else 0
                for path in sizes
            }
            metrics = {
                name: float(*value) for name, value in own.history[-1].items() if name != 'step'
            }
            cell = Cell(
                workload=self.workload.name,
                data=self.recipe.data,
                algorithm=key.algorithm,
                sparsity=key.sparsity,
                seed=key.seed,
                metric=metric.name,
                better=metric.better,
                value=metrics.pop(metric.name),
                metrics=metrics,
                reached=sum(zeros.values()) / max(1, sum(sizes.values())),
                layers={path: zeros[path] / max(1, size) for path, size in sizes.items()},
                steps=self.recipe.steps,
                seconds=progress.seconds / len(group),
                recipe=self.recipe.digest(),
            )
            write_cell(self.out, cell)
