"""Sweeps: every algorithm at every sparsity with every seed, in one compiled program for each algorithm.

Results go to a folder, one file for each finished cell. A sweep that was interrupted, or killed, goes on where its last
checkpoint is; cells that have finished are not run again.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.baselines.checkpointing import Checkpoints, Progress
from jaxpruner.baselines.fastest import choose_over, settle_over
from jaxpruner.baselines.fed import Fed
from jaxpruner.baselines.folders import claimed
from jaxpruner.baselines.logs import with_snapshot, write_logs
from jaxpruner.baselines.over import Over, Wanted
from jaxpruner.baselines.programs import Common, Programs
from jaxpruner.baselines.pruners import DENSE, check_algorithm
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Workload
from jaxpruner.report.results import Cell, read_cells, write_cell
from jaxpruner.sparsity_distributions import check_sparsity


class CellKey(NamedTuple):
    """One training of a sweep.

    >>> CellKey('set', 0.8, 0).name
    'set_0.8_0'
    """

    algorithm: str
    sparsity: float
    seed: int

    @property
    def name(self) -> str:
        """As its files are called."""
        return f'{self.algorithm}_{self.sparsity}_{self.seed}'


class Interrupted(Exception):
    """The sweep was asked to stop; what is done is in its checkpoint.

    >>> str(Interrupted('stopped'))
    'stopped'
    """


def plan(
    algorithms: Sequence[str], sparsities: Sequence[float], seeds: Sequence[int]
) -> list[CellKey]:
    """The cells of a comparison: the product, each once; the dense model has no sparsity.

    Args:
      algorithms: names.
      sparsities: in [0, 1].
      seeds: not negative.

    Raises:
      ValueError: an unknown name, a sparsity outside [0, 1], a negative seed.

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
    cells = [
        CellKey(algorithm, 0.0 if algorithm == DENSE else float(sparsity), seed)
        for algorithm, sparsity, seed in itertools.product(algorithms, sparsities, seeds)
    ]
    return list(dict.fromkeys(cells))


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
    over: Wanted | None = (
        None  # how the cells of an algorithm are trained, as `settle_over` takes it
    )
    tensorboard: bool = False  # also write event files

    def finished(self, set_aside: bool = True) -> list[CellKey]:
        """The cells whose results are in the folder.

        Args:
          set_aside: rename files that are no results, so that their cells are run again.
        """
        if not any(self.out.glob('cells/*.json')):
            return []
        cells = read_cells(self.out, set_aside=set_aside)
        return [CellKey(cell.algorithm, cell.sparsity, cell.seed) for cell in cells]

    def run(
        self,
        cells: Sequence[CellKey],
        on_chunk: Callable[[Sequence[CellKey], int], None] = lambda group, step: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains the cells that have no result yet.

        Args:
          cells: from `plan`.
          on_chunk: called after each chunk of steps with the cells that are trained together and the step.
          should_stop: asked after each chunk.

        Raises:
          Interrupted: `should_stop` said so.
          ValueError: the folder holds results of another recipe, another process writes there, or there is no such way
            to train cells.
        """
        with claimed(self.out, self.recipe):
            if not (pending := self._pending(cells)):
                return
            over, programs_of = self._settle(pending)
            programs: Programs | Fed | None = None
            trained = ''
            while pending:
                group, begun = self._next_group(pending, over)
                if programs is None or trained != group[0].algorithm:
                    trained = group[0].algorithm
                    programs = programs_of(trained)
                try:
                    self._run_group(programs, group, begun, on_chunk, should_stop)
                finally:
                    programs.close()
                pending = self._pending(cells)
                if should_stop():
                    raise Interrupted(f'stopped after {group[0].algorithm}')

    def _settle(self, pending: Sequence[CellKey]) -> tuple[Over, Callable[[str], Programs | Fed]]:
        """How cells are trained together, and what makes the programs of an algorithm."""
        if self.workload.task(self.recipe, self.data).feed is not None:
            if self.over not in ('each', 'auto', None):
                raise ValueError(
                    f'over {self.over!r}: batches of {self.recipe.data} come from the host, so that cells are trained '
                    "one after another; leave it out, or say 'each'"
                )
            return 'each', functools.partial(Fed, self.workload, self.recipe, self.data)
        largest = max(collections.Counter(cell.algorithm for cell in pending).values())
        over = settle_over(
            self.out, self.over, lambda: choose_over(self.workload, self.recipe, self.data, largest)
        ).over
        return over, functools.partial(
            Programs, Common(self.workload, self.recipe, self.data, over)
        )

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.out / 'checkpoints', self.recipe.digest())

    def _pending(self, wanted: Sequence[CellKey]) -> list[CellKey]:
        """The cells that have no result; checkpoints of those that have one are removed."""
        done = set(self.finished())
        self._checkpoints().clear(done)
        return [cell for cell in wanted if cell not in done]

    def _next_group(
        self, pending: Sequence[CellKey], over: Over
    ) -> tuple[list[CellKey], Progress | None]:
        """The cells that are trained next in one program, with their checkpoint; or all of an algorithm."""
        group, checkpoint = (
            [cell for cell in pending if cell.algorithm == pending[0].algorithm],
            None,
        )
        for progress in self._checkpoints().begun():
            if unfinished := [CellKey(*cell) for cell in progress.cells if cell in pending]:
                group, checkpoint = unfinished, progress
                break
        return group[:1] if over == 'each' else group, checkpoint

    def _run_group(
        self,
        programs: Programs | Fed,
        group: list[CellKey],
        begun: Progress | None,
        on_chunk: Callable,
        should_stop: Callable,
    ) -> None:
        """Trains cells of one algorithm from their checkpoint, if there is one, to the end."""
        checkpoints, seeds = self._checkpoints(), [cell.seed for cell in group]
        targets = programs.targets([cell.sparsity for cell in group])
        began = time.perf_counter()
        like = jax.eval_shape(lambda: programs.start(targets, seeds))
        feed = programs.open(seeds)
        restored = checkpoints.restore(begun, group, like, feed) if begun else None
        if restored is None:
            feed = (
                programs.open(seeds) if begun else feed
            )  # one that was restored in part is not used
            carries = programs.start(targets, seeds)
            masks = programs.masks(carries)
            progress = Progress(
                [(cell.algorithm, cell.sparsity, cell.seed) for cell in group],
                0,
                snapshots=with_snapshot({}, masks),
            )
        else:
            progress, carries = restored
            masks = programs.masks(carries)
        began -= progress.seconds
        for stop in [edge for edge in _edges(self.recipe) if edge > progress.step]:
            carries = programs.advance(targets, carries, progress.step, stop)
            metrics, masks = programs.report(targets, carries)
            entry = {
                'step': stop,
                **{name: np.asarray(values).tolist() for name, values in metrics.items()},
            }
            progress = Progress(
                progress.cells,
                stop,
                time.perf_counter() - began,
                (*progress.history, entry),
                with_snapshot(progress.snapshots, masks),
            )
            checkpoints.save(progress, carries, feed)
            on_chunk(group, stop)
            if stop < self.recipe.steps and should_stop():
                raise Interrupted(f'stopped after step {stop} of {group[0].algorithm}')
        self._write(group, progress, masks, programs.prunable())

    def _write(
        self,
        group: list[CellKey],
        progress: Progress,
        masks: dict[str, np.ndarray],
        sizes: dict[str, int],
    ) -> None:
        """Writes the results of finished cells, the cell's file last: where it is, the others are."""
        metric = self.workload.task(self.recipe, self.data).metric
        for number, key in enumerate(group):
            history = [
                {name: value if name == 'step' else value[number] for name, value in entry.items()}
                for entry in progress.history
            ]
            shown = {path: mask[:, number] for path, mask in progress.snapshots.items()}
            write_logs(self.out, key.name, history, shown, self.tensorboard)
            last = {name: float(value) for name, value in history[-1].items() if name != 'step'}
            zeros = {
                path: int((masks[path][number] == 0).sum()) if path in masks else 0
                for path in sizes
            }
            cell = Cell(
                workload=self.workload.name,
                data=self.recipe.data,
                algorithm=key.algorithm,
                sparsity=key.sparsity,
                seed=key.seed,
                metric=metric.name,
                better=metric.better,
                value=last.pop(metric.name),
                metrics=last,
                reached=sum(zeros.values()) / max(1, sum(sizes.values())),
                layers={path: zeros[path] / max(1, size) for path, size in sizes.items()},
                steps=self.recipe.steps,
                seconds=progress.seconds / len(group),
                recipe=self.recipe.digest(),
            )
            write_cell(self.out, cell)


def _edges(recipe: Recipe) -> list[int]:
    """The steps after which everything is evaluated and saved; the last step is one."""
    chunks = max(1, min(recipe.steps, round(1 / recipe.eval_every)))
    return np.linspace(0, recipe.steps, chunks + 1).round().astype(int).tolist()[1:]
