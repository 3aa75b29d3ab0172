"""Which way of training many cells a sweep takes: the one given, the one kept in its folder, or the fastest here."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax

from jaxpruner.baselines.over import OVERS, Over, Wanted, check_over, ways
from jaxpruner.baselines.programs import Common, Programs
from jaxpruner.baselines.pruners import DENSE
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Workload
from jaxpruner.core import atomic_files

FILE = 'over.json'
# By backend; where nothing is written, a sweep measures. On a CPU no way on one device was faster than `map` by a
# twentieth (`python -m benchmarks sweep`), and compiling ResNet's dense training for each way takes a quarter of the
# time in which nine algorithms with three seeds are trained.
MEASURED: Mapping[str, Over] = {'cpu': 'map'}
_SECONDS, _ROUNDS = 0.2, 5  # of a timing; of them for each way
_MARGIN = 0.05  # by which a way must be faster than one after another


class Choice(NamedTuple):
    """A way of training many cells, and why it was chosen.

    >>> Choice('map', 'given').words()
    'over map (given)'
    """

    over: Over
    reason: Literal['given', 'default', 'measured']
    ratios: Mapping[Over, float] = MappingProxyType(
        {}
    )  # of ways that were measured: times one after another

    def words(self) -> str:
        """The choice in a line."""
        ratios = ', '.join(f'{over} {ratio:.2f}' for over, ratio in self.ratios.items())
        return f'over {self.over} ({self.reason}{": times one after another, " if ratios else ""}{ratios})'


def settle_over(out: Path, wanted: Wanted | None, measure: Callable[[], Choice]) -> Choice:
    """Decides for a way and keeps the decision in the folder.

    Another way than before is harmless: checkpoints do not depend on it, and results do but in rounding.

    Args:
      out: the folder of results; it exists.
      wanted: a way; 'auto' for what was measured, once for a folder; `None` for what was given or measured before, or
        else the way that this backend is known to be fast with.
      measure: finds the fastest.

    Raises:
      ValueError: there is no such way here, or the file in the folder is damaged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     given = settle_over(Path(folder), 'vmap', lambda: Choice('map', 'measured'))
    ...     settle_over(Path(folder), None, lambda: Choice('map', 'measured')) == given
    True
    """
    kept = read_choice(out)
    if kept is not None and kept.over not in ways():  # on another machine
        kept = None
    default = MEASURED.get(jax.default_backend())
    if wanted not in ('auto', None):
        check_over(wanted)
        choice = Choice(wanted, 'given')
    elif kept is not None and kept.reason in (
        ('measured',) if wanted == 'auto' else ('given', 'measured')
    ):
        return kept
    else:
        choice = Choice(default, 'default') if wanted is None and default else measure()
    text = json.dumps({**choice._asdict(), 'ratios': dict(choice.ratios)}, indent=1) + '\n'
    atomic_files.replace_file(out / FILE, lambda temporary: temporary.write_text(text))
    return choice


def read_choice(out: Path) -> Choice | None:
    """The way that a folder has kept, `None` where it has none.

    Args:
      out: the folder of results.

    Raises:
      ValueError: the file is damaged.

    >>> read_choice(Path('nowhere')) is None
    True
    """
    path = out / FILE
    if not path.exists():
        return None
    try:
        choice = Choice(**json.loads(path.read_bytes().decode()))
        if choice.over not in OVERS:
            raise ValueError(f'over {choice.over!r} is none of {", ".join(OVERS)}')
        choice.words()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} does not say how cells are trained ({error}): delete it'
        ) from None
    return choice


def choose_over(workload: Workload, recipe: Recipe, data: Any, cells: int) -> Choice:
    """Measures the ways that there are with some steps of the dense model: interleaved, medians of ratios.

    Args:
      workload: what is trained.
      recipe: its numbers.
      data: of the workload.
      cells: how many are trained in one program.

    Returns:
      The fastest way; 'each' where none is faster by a twentieth, or for a single cell.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['resnet']
    >>> choose_over(workload, workload.default('default'), None, cells=1).over
    'each'
    """
    if cells == 1:
        return Choice('each', 'default')
    order = list(ways())
    runs = {over: _run_of(Common(workload, recipe, data, over), over, cells) for over in order}
    steps = _steps_that_last(runs['each'], recipe.steps)
    seconds: dict[Over, list[float]] = {over: [] for over in order}
    for number in range(_ROUNDS):
        for over in order[number % len(order) :] + order[: number % len(order)]:
            seconds[over].append(_timed(runs[over], steps))
    return fastest(seconds)


def fastest(seconds: Mapping[Over, list[float]]) -> Choice:
    """Picks a way by its times.

    Args:
      seconds: of each way, a time for each round; 'each' is among them.

    >>> fastest({'each': [1.0, 2.0, 1.0], 'map': [0.97, 1.94, 3.0], 'vmap': [0.5, 1.0, 3.0]}).over
    'vmap'
    """
    ratios: dict[Over, float] = {}
    for over, times in seconds.items():
        ratios[over] = statistics.median(
            mine / each for mine, each in zip(times, seconds['each'], strict=True)
        )
    best = min(ratios, key=lambda over: ratios[over])
    return Choice(best if ratios[best] < 1 - _MARGIN else 'each', 'measured', ratios)


def _run_of(common: Common, over: Over, cells: int) -> Callable[[int], None]:
    """A call that trains all cells for so many steps; it is compiled already."""
    programs = Programs(common, DENSE)
    together = 1 if over == 'each' else cells
    targets = programs.targets([0.0] * together)
    held = [programs.start(targets, range(at, at + together)) for at in range(0, cells, together)]

    def run(steps: int) -> None:
        for at, carries in enumerate(held):
            held[at] = jax.block_until_ready(programs.advance(targets, carries, 0, steps))

    run(1)
    return run


def _steps_that_last(run: Callable[[int], None], most: int) -> int:
    """As many steps as take long enough for a clock, and for one step to weigh little."""
    steps = 1
    while (seconds := _timed(run, steps)) < _SECONDS and steps < most:
        steps = min(
            most, max(2 * steps, math.ceil(steps * _SECONDS / max(seconds, 1e-9))), 8 * steps
        )
    return steps


def _timed(run: Callable[[int], None], steps: int) -> float:
    began = time.perf_counter()
    run(steps)
    return time.perf_counter() - began
