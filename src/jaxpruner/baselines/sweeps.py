"""Sweeps: every algorithm at every sparsity with every seed, one compiled program per algorithm.

Results go to a folder, one file for each finished cell. A sweep that was interrupted or killed
goes on at its last checkpoint; finished cells are not run again.
"""

import collections
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpruner.baselines.cell_key import CellKey
from jaxpruner.baselines.cell_logs import Masks, with_snapshot, write_logs
from jaxpruner.baselines.cell_mapping import CellMapping, RequestedMapping
from jaxpruner.baselines.checkpointing import Checkpoints, Progress
from jaxpruner.baselines.compiled_training import CompiledTraining, SharedPrograms
from jaxpruner.baselines.feed_training import FeedTraining
from jaxpruner.baselines.mapping_choice import measure_mappings, settle_mapping
from jaxpruner.baselines.pruners import DENSE, check_algorithm
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.sweep_folder import claimed, keep_recipe
from jaxpruner.baselines.task import Workload
from jaxpruner.baselines.training import Training
from jaxpruner.report.results import Cell, read_cells, write_cell
from jaxpruner.sparsity_distributions import check_sparsity

CellTraining = CompiledTraining | FeedTraining


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
    mapping: RequestedMapping | None = None  # how cells are trained together: `--over`
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
            mapping, training_of = self._settle(pending)
            training: CellTraining | None = None
            algorithm = ''
            while pending:
                group, begun = self._next_group(pending, mapping)
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

    def _settle(
        self, pending: Sequence[CellKey]
    ) -> tuple[CellMapping, Callable[[str], CellTraining]]:
        """How cells are trained together, and what makes the training of an algorithm."""
        task = self.workload.task(self.recipe, self.data)
        if task.feed is not None:
            if self.mapping not in ('each', 'auto', None):
                raise ValueError(
                    f'over {self.mapping!r}: batches of {self.recipe.data} come from the host, so '
                    "that cells are trained one after another; leave it out, or say 'each'"
                )
            training_of = functools.partial(FeedTraining, self.workload, self.recipe, self.data)
            return 'each', training_of
        counts = collections.Counter(cell.algorithm for cell in pending)
        settings = self.workload, self.recipe, self.data
        most_cells = max(counts.values())
        measure = functools.partial(measure_mappings, *settings, most_cells)
        mapping = settle_mapping(self.out, self.mapping, measure).mapping
        programs = SharedPrograms(*settings, mapping)
        return mapping, functools.partial(CompiledTraining, programs)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.out / 'checkpoints', self.recipe.digest())

    def _pending(self, cells: Sequence[CellKey]) -> list[CellKey]:
        """The cells without a result; checkpoints of the others are removed."""
        finished = set(self.finished())
        self._checkpoints().clear(finished)
        return [cell for cell in cells if cell not in finished]

    def _next_group(
        self, pending: Sequence[CellKey], mapping: CellMapping
    ) -> tuple[list[CellKey], Progress | None]:
        """The cells to train together next: those of a checkpoint, or else all of an algorithm."""
        algorithm = pending[0].algorithm
        group = [cell for cell in pending if cell.algorithm == algorithm]
        checkpoint = None
        for progress in self._checkpoints().begun():
            unfinished = [cell for cell in progress.cells if cell in pending]
            if unfinished:
                group = unfinished
                checkpoint = progress
                break
        return group[:1] if mapping == 'each' else group, checkpoint

    def _run_group(
        self,
        training: CellTraining,
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
        for stop in _chunk_ends(self.recipe):
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
        self,
        group: list[CellKey],
        progress: Progress,
        masks: Masks,
        sizes: dict[str, int],
    ) -> None:
        """Writes the results of finished cells; a cell's own file is the last, after its logs."""
        metric = self.workload.task(self.recipe, self.data).metric
        for number, key in enumerate(group):
            history = progress.history_of(number)
            snapshots = progress.snapshots_of(number)
            write_logs(self.out, key.name, history, snapshots, self.tensorboard)
            zeros = dict.fromkeys(sizes, 0)
            for path in sizes.keys() & masks.keys():
                is_pruned = masks[path][number] == 0
                zeros[path] = int(is_pruned.sum())
            metrics = {name: float(value) for name, value in history[-1].items()}
            del metrics['step']
            zeros_of_all = sum(zeros.values())
            weights_of_all = max(1, sum(sizes.values()))
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
                reached=zeros_of_all / weights_of_all,
                layers={path: zeros[path] / max(1, size) for path, size in sizes.items()},
                steps=self.recipe.steps,
                seconds=progress.seconds / len(group),
                recipe=self.recipe.digest(),
            )
            write_cell(self.out, cell)


def _chunk_ends(recipe: Recipe) -> list[int]:
    """The steps after which everything is evaluated and saved; the last step is one."""
    chunks = min(recipe.steps, round(1 / recipe.eval_every))
    evenly = np.linspace(0, recipe.steps, max(1, chunks) + 1)
    _, *ends = evenly.round().astype(int).tolist()
    return ends
