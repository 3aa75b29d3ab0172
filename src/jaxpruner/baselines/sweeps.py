"""Sweeps: every algorithm at every sparsity with every seed, one compiled program per algorithm.

Results go to a folder, one file for each finished cell, with one process that writes at a time. A sweep that was
interrupted or killed goes on at its last checkpoint; finished cells are not run again.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpruner.baselines.checkpointing import CellKey, Checkpoints, Progress
from jaxpruner.baselines.programs import Masks, Programs, masks_by_path
from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.baselines.task import Workload
from jaxpruner.baselines.training import DENSE, check_algorithm
from jaxpruner.files import atomic_files
from jaxpruner.files.atomic_files import errors_named, locked
from jaxpruner.report.results import Cell, read_cells, write_cell
from jaxpruner.sparsity_distributions import check_sparsity

_RECIPE = 'recipe.toml'


@contextlib.contextmanager
def claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Keeps other processes and other recipes from writing to a folder of results.

    The folder is made where it is missing. Who writes holds the file `.lock` in it; the system releases the lock when
    that process ends, however it ends. A `ValueError` names what is in the way.
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
        if path.exists() and _has_begun(out):
            # Fields of algorithms of one's own stand in a file only if that recipe sets them.
            pruning = dataclasses.replace(recipe.pruning, own={})
            existing = read_recipe(path, dataclasses.replace(recipe, pruning=pruning))
            old, new = existing.to_toml().splitlines(), recipe.to_toml().splitlines()
            there = next((line for line in old if line not in new), 'nothing')
            now = next((line for line in new if line not in old), 'nothing')
            if existing != recipe:
                raise ValueError(
                    f'{path} is another recipe ({there!r} there, {now!r} now); its results cannot be continued: choose '
                    'another --out, or the same recipe'
                )
        yield


def keep_recipe(out: Path, recipe: Recipe) -> None:
    """Writes the recipe of a claimed folder, in which no cell has begun with another one."""
    if not ((out / _RECIPE).exists() and _has_begun(out)):
        recipe.write(out / _RECIPE)


def _has_begun(out: Path) -> bool:
    """Whether a cell has a result or a checkpoint."""
    return any(out.glob('cells/[!.]*.json')) or any(out.glob('checkpoints/*/*'))


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
    tensorboard: bool = False  # also write event files

    def finished(self) -> list[CellKey]:
        """The cells whose results are in the folder; a damaged result is renamed, to be run again."""
        if not any(self.out.glob('cells/[!.]*.json')):
            return []
        cells = read_cells(self.out, set_aside=True)
        return [CellKey(cell.algorithm, cell.sparsity, cell.seed) for cell in cells]

    def run(
        self,
        cells: Sequence[CellKey],
        on_chunk: Callable[[Sequence[CellKey], int], None] = lambda group, step: None,
    ) -> None:
        """Trains the cells that have no result yet.

        After each chunk of steps, once its checkpoint is written, `on_chunk` gets the cells that are trained together
        and the step. What it raises, Ctrl-C too, stops the sweep, which a later call continues from there.

        Raises:
          ValueError: the folder holds results of another recipe, or another process writes there;
            the recipe is wrong for one of the algorithms, of which none has been trained then.
        """
        with claimed(self.out, self.recipe):
            if not (pending := self._pending(cells)):
                return
            programs = Programs(self.workload, self.recipe, self.data)
            # How each algorithm begins, traced: a wrong recipe is refused before hours of training.
            for cell in {cell.algorithm: cell for cell in pending}.values():
                targets = programs.targets(cell.algorithm, [cell.sparsity])
                start = functools.partial(programs.start, cell.algorithm, targets, [cell.seed])
                jax.eval_shape(start)
            keep_recipe(self.out, self.recipe)
            while pending:
                # The cells to train together next: those of a checkpoint, or else all of an algorithm.
                group = [cell for cell in pending if cell.algorithm == pending[0].algorithm]
                if programs.task.feed is not None:
                    group = group[:1]
                begun = None
                for progress in self._checkpoints().begun():
                    if set(progress.cells) & set(pending):
                        group, begun = list(progress.cells), progress
                        break
                self._run_group(programs, group, begun, on_chunk)
                pending = self._pending(cells)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.out / 'checkpoints')

    def _pending(self, cells: Sequence[CellKey]) -> list[CellKey]:
        """The cells without a result; checkpoints of the others are removed."""
        finished = set(self.finished())
        self._checkpoints().clear(finished)
        return [cell for cell in cells if cell not in finished]

    def _run_group(
        self, programs: Programs, group: list[CellKey], begun: Progress | None, on_chunk: Callable
    ) -> None:
        """Trains cells of one algorithm to the end, from their checkpoint if there is one.

        A checkpoint that cannot be read is set aside, and nothing is trained.
        """
        checkpoints, algorithm = self._checkpoints(), group[0].algorithm
        seeds = [cell.seed for cell in group]
        targets = programs.targets(algorithm, [cell.sparsity for cell in group])
        with contextlib.ExitStack() as stack:
            feed = None
            if programs.task.feed is not None:
                feed = stack.enter_context(contextlib.closing(programs.task.feed(*seeds)))
            if begun is None:
                carries = programs.start(algorithm, targets, seeds)
                progress = Progress(group, 0)
                progress = _with_snapshot(progress, masks_by_path(carries.opt_state))
            else:
                like = jax.eval_shape(lambda: programs.start(algorithm, targets, seeds))
                restored = checkpoints.restore(begun, like, feed)
                if restored is None:
                    return
                progress, carries = restored
            writers = []
            if self.tensorboard:
                from tensorboardX import SummaryWriter

                folders = [str(self.out / 'tensorboard' / cell.name) for cell in group]
                writers = [stack.enter_context(SummaryWriter(folder)) for folder in folders]
            began, metrics = time.perf_counter() - progress.seconds, None
            # After each chunk of steps everything is evaluated and saved.
            for stop in self._stops():
                if stop <= progress.step:
                    continue
                bounds = progress.step, stop
                carries = programs.advance(algorithm, targets, carries, *bounds, feed=feed)
                metrics = programs.report(algorithm, targets, carries, seeds)
                for position, writer in enumerate(writers):
                    for name, values in metrics.items():
                        writer.add_scalar(name, values[position], stop)
                progress = progress._replace(step=stop, seconds=time.perf_counter() - began)
                progress = _with_snapshot(progress, masks_by_path(carries.opt_state))
                checkpoints.save(progress, carries, feed)
                on_chunk(group, stop)
            if metrics is None:  # a run was killed behind its last checkpoint
                metrics = programs.report(algorithm, targets, carries, seeds)
        masks, finished = masks_by_path(carries.opt_state), self.finished()
        for position, cell in enumerate(group):
            if cell not in finished:
                self._write(programs, progress, position, metrics, masks)

    def _stops(self) -> list[int]:
        """The steps after which everything is evaluated and saved."""
        chunks = max(1, min(self.recipe.steps, round(1 / self.recipe.eval_every)))
        return np.linspace(0, self.recipe.steps, chunks + 1).round().astype(int).tolist()

    def _write(
        self, programs: Programs, progress: Progress, position: int, metrics: Any, masks: Masks
    ) -> None:
        """Writes the result of one of the cells, its own file last.

        `masks/<name>.npz` has for each leaf that is kept over time uint8[1 + evaluations, …leaf shape], the first
        before the first step; there is none for a dense model.
        """
        key, sizes = progress.cells[position], programs.prunable()
        if progress.snapshots:
            arrays = {path: moments[:, position] for path, moments in progress.snapshots.items()}
            steps = np.asarray([0, *self._stops()[1:]], np.int64)

            def write(path: Path) -> None:
                with path.open('wb') as file:  # a name alone would get another ending
                    np.savez_compressed(file, allow_pickle=False, steps=steps, **arrays)

            atomic_files.replace_file(self.out / 'masks' / f'{key.name}.npz', write)
        own = {path: masks[path][position] for path in sizes if path in masks}
        zeros = {path: int((own[path] == 0).sum()) if path in own else 0 for path in sizes}
        values = {name: float(values[position]) for name, values in metrics.items()}
        metric = programs.task.metric
        cell = Cell(
            workload=self.workload.name,
            data=self.recipe.data,
            algorithm=key.algorithm,
            sparsity=key.sparsity,
            seed=key.seed,
            metric=metric.name,
            better=metric.better,
            value=values.pop(metric.name),
            metrics=values,
            reached=sum(zeros.values()) / max(1, sum(sizes.values())),
            layers={path: zeros[path] / max(1, size) for path, size in sizes.items()},
            steps=self.recipe.steps,
            seconds=progress.seconds / len(progress.cells),
            recipe=self.recipe.digest(),
        )
        write_cell(self.out, cell)


def _with_snapshot(progress: Progress, masks: Masks) -> Progress:
    """Adds the masks of this moment: of the first kernel, and of the largest other one."""
    first, others = list(masks)[:1], list(masks)[1:]
    shown = first + sorted(others, key=lambda path: -masks[path].size)[:1]
    now = {path: masks[path][None] for path in shown}
    if earlier := progress.snapshots:
        now = {path: np.concatenate([earlier[path], now[path]]) for path in shown}
    return progress._replace(snapshots=now)
