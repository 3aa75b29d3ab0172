"""Training the cells of an algorithm together, or in one program, against one after another."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.report import Row
from benchmarks.timing import interleaved, ratio
from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.programs import Programs
from jaxpruner.baselines.task import Carry
from jaxpruner.sparse_state import sparse_states

ALGORITHM, SPARSITY = 'magnitude', 0.8
CELLS = {'small': 3, 'cpu': 4, 'gpu': 16}
STEPS = {
    'small': {'lenet': 8},
    'cpu': {'resnet': 20, 'vit': 20, 'lenet': 200, 'federated': 12, 't5': 12, 'dqn': 200},
    'gpu': {'resnet': 100, 'vit': 100, 'lenet': 500, 'federated': 50, 't5': 100, 'dqn': 1000},
}
ROUNDS = 7
COLUMNS = (
    'seconds',
    'times one after another',
    'seconds to compile',
    'difference of the metric',
    'in test examples',
)


def run(size: str, rounds: int) -> list[Row]:
    """Times each workload in each way."""
    rows = []
    for name, steps in STEPS[size].items():
        if name != 'dqn' or importlib.util.find_spec('gymnax'):
            rows += _rows(name, steps, CELLS[size], rounds)
    return rows


class Trained(NamedTuple):
    """What came out of all cells."""

    metric: np.ndarray  # float[cells]
    # Of the leaves after the first update that prunes, uint8[cells, …leaf shape].
    masks: list[np.ndarray]


def _rows(name: str, steps: int, cells: int, rounds: int) -> list[Row]:
    workload = WORKLOADS[name]
    # Few updates of masks, as in a whole training most steps have none.
    recipe = workload.default('default').updated({'steps': steps, 'pruning': {'frequency': 0.25}})
    data = workload.data(recipe, None)
    metric = workload.task(recipe, data).metric.name
    sides = {over: _Side(workload, recipe, data, over, cells) for over in ('each', 'map', 'vmap')}
    cold = {over: _seconds(side.train) for over, side in sides.items()}
    times = interleaved({over: side.train for over, side in sides.items()}, rounds)
    first = sides['each'].first_update()
    trained = {over: side.trained(first, metric) for over, side in sides.items()}
    tests = len(data.y_test) if metric == 'accuracy' else None
    rows = []
    for over in sides:
        for mask, reference in zip(trained[over].masks, trained['each'].masks, strict=True):
            differing = int((mask != reference).sum())
            assert not differing, (
                f'{name} over {over}: {differing} weights are masked otherwise at step {first}'
            )
        difference = float(np.abs(trained[over].metric - trained['each'].metric).max())
        values = (
            times[over].median,
            ratio(times[over], times['each']),
            max(0.0, cold[over] - times[over].median),
            difference,
            None if tests is None else round(difference * tests),
        )
        rows.append(Row(f'{name}, {cells} cells of {steps} steps: {over}', values))
    return rows


class _Side:
    """One way of training."""

    def __init__(self, workload: Any, recipe: Any, data: Any, over: str, cells: int):
        self.programs = Programs(workload, recipe, data, 'vmap' if over == 'vmap' else 'map')
        self.steps = recipe.steps
        together = 1 if over == 'each' else cells
        self.groups = [range(at, at + together) for at in range(0, cells, together)]
        self.targets = self.programs.targets(ALGORITHM, [SPARSITY] * together)

    def train(self, stop: int | None = None) -> list[Carry]:
        stop = self.steps if stop is None else stop
        trained = []
        for seeds in self.groups:
            carries = self.programs.start(ALGORITHM, self.targets, seeds)
            carries = self.programs.advance(ALGORITHM, self.targets, carries, 0, stop)
            # Waited for, as a sweep does: a CPU would begin with the next ones meanwhile.
            trained.append(jax.block_until_ready(carries))
        return trained

    def first_update(self) -> int:
        """The number of steps after which the first masks have zeros."""
        for stop in range(1, self.steps + 1):
            if any((mask == 0).any() for mask in _masks(self.train(stop))):
                return stop
        raise AssertionError(f'nothing was pruned in {self.steps} steps')

    def trained(self, first: int, metric: str) -> Trained:
        values = [
            self.programs.report(ALGORITHM, self.targets, carries, seeds)[metric]
            for carries, seeds in zip(self.train(), self.groups, strict=True)
        ]
        return Trained(np.concatenate(values), _masks(self.train(first)))


def _masks(groups: list[Carry]) -> list[np.ndarray]:
    masks_of_groups = []
    for carries in groups:
        states = sparse_states(carries.opt_state)
        masks = jax.tree.leaves([state.masks for state in states])
        masks_of_groups.append(map(np.asarray, masks))
    return [np.concatenate(parts) for parts in zip(*masks_of_groups, strict=True)]


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began
