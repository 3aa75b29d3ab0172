"""What passes before the first training step, and what a first call takes; each measured in cold processes.

A training waits for `init`, for tracing and lowering of its step, and for the compiler. Its reference is the dense step
of the same model. That of a first call is the second one, in the same process. Seconds that the cores worked depend
less on what else a machine does.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import track

from benchmarks.cold import CASES, DENSE, FirstStep
from benchmarks.report import Row
from benchmarks.timing import Lap, Timing, ratio

ROUNDS = 3
COLUMNS = (
    'init',
    'lower',
    'compile',
    'seconds',
    'limit in seconds',
    'times the reference',
    'limit',
    'the original',
    'core seconds',
    'core seconds, times the reference',
)
STEP_PARTS = ('init', 'lower', 'compile')
# Of the ratio.
LIMITS = {
    '24 layers, 96 kernels: magnitude': 1.7,
    '24 layers, 96 kernels: global magnitude': 2.0,
    '24 layers, 96 kernels: RigL': 3.0,
    '24 layers, 96 kernels: straight-through magnitude': 2.5,
    '13 blocks, 214 arrays: magnitude': 1.6,
}
LIMITS_IN_SECONDS = {'instant_sparsify, 96 kernels of 4 shapes: cold': 1.5}
# Seconds for `init`, tracing and lowering, compiling with JaxPruner on 2 cores (JAX 0.10.2, CPU), where its RigL fails.
# The dense steps are those of that machine, so that these ratios stand beside ours.
THE_ORIGINAL = {
    '6 layers, 24 kernels: dense': (0.02, 0.24, 1.00),
    '6 layers, 24 kernels: magnitude': (0.22, 0.35, 1.41),
    '6 layers, 24 kernels: global magnitude': (1.01, 0.25, 1.35),
    '24 layers, 96 kernels: dense': (0.10, 0.69, 1.83),
    '24 layers, 96 kernels: magnitude': (0.27, 0.93, 2.98),
    '24 layers, 96 kernels: global magnitude': (1.08, 0.81, 3.18),
}

# For each round, what the parts took.
_Rounds = list[dict[str, Lap]]


def run(size: str, rounds: int) -> Iterator[Row]:
    """Measures each case in a process of its own, in each round."""
    measured: dict[str, _Rounds] = {name: [] for name in CASES[size]}
    try:
        _measure(size, rounds, measured)
    finally:  # if it is stopped, there are rows of what is measured
        for name, case in CASES[size].items():
            if isinstance(case, FirstStep):
                title, _ = name.split(': ')
                dense = f'{title}: {DENSE}'
                both = list(zip(measured[name], measured[dense], strict=False))
                if both:
                    yield _step_row(name, dense, *map(list, zip(*both, strict=True)))
            elif measured[name]:
                yield from _call_rows(name, measured[name])


def _measure(size: str, rounds: int, measured: dict[str, _Rounds]) -> None:
    order, shuffle = list(CASES[size]), random.Random(0).shuffle
    in_turns = []
    for _ in range(rounds):
        shuffle(order)
        in_turns += order
    console = Console(stderr=True)
    for name in track(in_turns, 'cold processes', console=console, disable=not console.is_terminal):
        command = [sys.executable, '-m', 'benchmarks.cold', size, name]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        parts = {part: Lap(*lap) for part, lap in json.loads(printed).items()}
        measured[name].append(parts)


class _Taken(NamedTuple):
    """What some parts took together."""

    seconds: Timing
    core_seconds: Timing

    @classmethod
    def by(cls, rounds: _Rounds, *parts: str) -> Self:
        laps = [[laps[part] for part in parts] for laps in rounds]
        return cls(
            Timing([sum(lap.seconds for lap in each) for each in laps]),
            Timing([sum(lap.core_seconds for lap in each) for each in laps]),
        )


def _step_row(name: str, dense: str, rounds: _Rounds, of_dense: _Rounds) -> Row:
    parts = [_Taken.by(rounds, part).seconds.median for part in STEP_PARTS]
    original = None
    if name in THE_ORIGINAL:
        original = sum(THE_ORIGINAL[name]) / sum(THE_ORIGINAL[dense])
    taken, reference = (_Taken.by(each, *STEP_PARTS) for each in (rounds, of_dense))
    return _row(name, parts, taken, reference, original)


def _call_rows(name: str, rounds: _Rounds) -> list[Row]:
    cold, warm = _Taken.by(rounds, 'cold'), _Taken.by(rounds, 'warm')
    return [
        _row(f'{name}: {which}', [None] * len(STEP_PARTS), taken, warm)
        for which, taken in (('cold', cold), ('warm', warm))
    ]


def _row(
    name: str,
    parts: Sequence[float | None],
    taken: _Taken,
    reference: _Taken,
    original: float | None = None,
) -> Row:
    has_spread = len(taken.seconds.rounds) > 1
    values = (
        *parts,
        taken.seconds.median,
        LIMITS_IN_SECONDS.get(name),
        ratio(taken.seconds, reference.seconds) if has_spread else None,
        LIMITS.get(name),
        original,
        taken.core_seconds.median,
        ratio(taken.core_seconds, reference.core_seconds) if has_spread else None,
    )
    return Row(name, values)
