"""Which cell mapping a sweep uses: the given one, the one kept in its folder, or the fastest here."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax

from jaxpruner.baselines.cell_mapping import (
    CELL_MAPPINGS,
    CellMapping,
    RequestedMapping,
    available_mappings,
    check_mapping,
)
from jaxpruner.baselines.compiled_training import CompiledTraining, SharedPrograms
from jaxpruner.baselines.pruners import DENSE
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Workload
from jaxpruner.files import atomic_files

FILE = 'over.json'
# By backend; a sweep measures on the others. On a CPU no mapping on one device was faster than
# 'map' by a twentieth (`python -m benchmarks sweep`), and compiling ResNet's dense training for
# each mapping takes a quarter of the time in which nine algorithms with three seeds are trained.
DEFAULTS: Mapping[str, CellMapping] = {'cpu': 'map'}
_SECONDS = 0.2  # that a timing lasts
_ROUNDS = 5
_MARGIN = 0.05  # by which a mapping must be faster than 'each'


class MappingChoice(NamedTuple):
    """A cell mapping, and why it was chosen."""

    mapping: CellMapping
    reason: Literal['given', 'default', 'measured']
    # Of the mappings that were measured: their time over that of 'each'.
    ratios: Mapping[CellMapping, float] = MappingProxyType({})

    def words(self) -> str:
        """The choice in a line."""
        if not self.ratios:
            return f'over {self.mapping} ({self.reason})'
        ratios = ', '.join(f'{name} {ratio:.2f}' for name, ratio in self.ratios.items())
        return f'over {self.mapping} ({self.reason}: times one after another, {ratios})'

    def to_json(self) -> str:
        """The choice as `over.json` holds it."""
        fields = {'over': self.mapping, 'reason': self.reason, 'ratios': dict(self.ratios)}
        return json.dumps(fields, indent=1) + '\n'

    @classmethod
    def from_json(cls, text: str) -> 'MappingChoice':
        """Raises a `ValueError`, `KeyError`, `TypeError` or `AttributeError` for other text."""
        fields = json.loads(text)
        choice = cls(fields.pop('over'), **fields)
        if choice.mapping not in CELL_MAPPINGS:
            raise ValueError(f'over {choice.mapping!r} is none of {", ".join(CELL_MAPPINGS)}')
        choice.words()
        return choice


def settle_mapping(
    out: Path, requested: RequestedMapping | None, measure: Callable[[], MappingChoice]
) -> MappingChoice:
    """Chooses a mapping and keeps the choice in the folder `out`, which exists.

    'auto' measures once for a folder. `None` keeps what was given or measured before, or else takes
    the backend's default. Another mapping than before is harmless: checkpoints do not depend on it,
    and results differ by rounding alone.
    """
    kept = read_choice(out)
    if kept is not None and kept.mapping not in available_mappings():  # from another machine
        kept = None
    default = DEFAULTS.get(jax.default_backend())
    lasting_reasons = ('measured',) if requested == 'auto' else ('given', 'measured')
    if requested not in ('auto', None):
        check_mapping(requested)
        choice = MappingChoice(requested, 'given')
    elif kept is not None and kept.reason in lasting_reasons:
        return kept
    elif requested is None and default:
        choice = MappingChoice(default, 'default')
    else:
        choice = measure()
    text = choice.to_json()
    atomic_files.replace_file(out / FILE, lambda temporary: temporary.write_text(text))
    return choice


def read_choice(out: Path) -> MappingChoice | None:
    """The choice that a folder of results keeps, if any; `ValueError` for a damaged file."""
    path = out / FILE
    if not path.exists():
        return None
    try:
        return MappingChoice.from_json(path.read_bytes().decode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} does not say how cells are trained ({error}): delete it'
        ) from None


def measure_mappings(workload: Workload, recipe: Recipe, data: Any, cells: int) -> MappingChoice:
    """Times some steps of the dense model with each mapping; rounds are interleaved.

    The choice is 'each' for a single cell, and where no mapping is faster by a twentieth.
    """
    if cells == 1:
        return MappingChoice('each', 'default')
    mappings = list(available_mappings())
    runs = {}
    for mapping in mappings:
        programs = SharedPrograms(workload, recipe, data, mapping)
        runs[mapping] = _run_of(programs, mapping, cells)
    steps = _steps_that_last(runs['each'], recipe.steps)
    seconds: dict[CellMapping, list[float]] = {mapping: [] for mapping in mappings}
    for number in range(_ROUNDS):
        first = number % len(mappings)
        for mapping in mappings[first:] + mappings[:first]:
            seconds[mapping].append(_timed(runs[mapping], steps))
    return pick_fastest(seconds)


def pick_fastest(seconds: Mapping[CellMapping, list[float]]) -> MappingChoice:
    """Picks a mapping by its times, one for each round, from medians of ratios to 'each'.

    >>> pick_fastest({'each': [1.0, 2.0, 1.0], 'vmap': [0.5, 1.0, 3.0]}).mapping
    'vmap'
    """
    ratios: dict[CellMapping, float] = {}
    for mapping, times in seconds.items():
        pairs = zip(times, seconds['each'], strict=True)
        ratios[mapping] = statistics.median(duration / reference for duration, reference in pairs)
    best = min(ratios, key=lambda mapping: ratios[mapping])
    if ratios[best] >= 1 - _MARGIN:
        best = 'each'
    return MappingChoice(best, 'measured', ratios)


def _run_of(programs: SharedPrograms, mapping: CellMapping, cells: int) -> Callable[[int], None]:
    """A compiled call that trains all cells for a number of steps."""
    training = CompiledTraining(programs, DENSE)
    together = 1 if mapping == 'each' else cells
    targets = training.targets([0.0] * together)
    groups = []
    for first in range(0, cells, together):
        groups.append(training.start(targets, range(first, first + together)))

    def run(steps):
        for number, carries in enumerate(groups):
            trained = training.advance(targets, carries, 0, steps)
            groups[number] = jax.block_until_ready(trained)

    run(1)
    return run


def _steps_that_last(run: Callable[[int], None], most: int) -> int:
    """Enough steps for a clock, and for a single step to weigh little."""
    steps = 1
    while (seconds := _timed(run, steps)) < _SECONDS and steps < most:
        needed = math.ceil(steps * _SECONDS / max(seconds, 1e-9))
        steps = min(most, max(2 * steps, needed), 8 * steps)
    return steps


def _timed(run: Callable[[int], None], steps: int) -> float:
    began = time.perf_counter()
    run(steps)
    return time.perf_counter() - began
