"""Training steps against dense ones: Adam, donated buffers, masks at a sparsity of 0.9.

Each step is timed in pairs with the dense step, in two ways: as single steps that are waited for, and as loops of
steps, as in training, where one step is handed over while others run. The dense step is also timed against a copy of
itself that was compiled separately, which shows the noise. The placement of memory differs from process to process, and
with it the time of short steps. On a CPU several processes therefore take a part of the pairs each.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.models import TRAINED
from benchmarks.report import Row
from benchmarks.timing import Ratio, Timing, interleaved, interval, ratio
from benchmarks.training import METHODS, Training

ROUNDS = 200
PROCESSES, FEWEST_IN_A_PROCESS = 5, 20
PAIRS_FOR_A_LOOP = 4  # there is one pair of loops for so many pairs of steps
FEWEST_STEPS, LOOP_SECONDS = 4, 0.05  # each loop has and takes at least so many
COLUMNS = (
    'milliseconds, waited for',
    'times the dense step',
    'interval of the median',
    'limit',
    'milliseconds in a loop',
    'times the dense loop',
    'interval of its median',
)
# What the lower end of the interval has to stay below, for the transformer and for the MLP, whose step is short.
LIMITS = {
    'magnitude, in-graph': (1.03, 1.05),
    'magnitude, in-graph, packed': (1.03, 1.05),
    'RigL, in-graph': (1.06, 1.12),
    'straight-through magnitude': (1.12, 1.40),
    'magnitude, an update due': (1.5, 1.5),
}

# A step allocates its temporaries anew. By default glibc has the kernel map and unmap them each time, which takes a
# fifth of a dense step here.
KEEP_MEMORY = {
    'MALLOC_MMAP_MAX_': '0',
    'MALLOC_TRIM_THRESHOLD_': str(2**40),
    'MALLOC_TOP_PAD_': str(2**28),
}


def environment() -> Mapping[str, str]:
    """What a process needs to keep the memory of a step for the next, if this one does not."""
    if jax.default_backend() != 'cpu' or KEEP_MEMORY.keys() <= os.environ.keys():
        return {}
    return KEEP_MEMORY


def run(size: str, rounds: int) -> list[Row]:
    """Times the steps of each model by each method."""
    processes = 1
    if jax.default_backend() == 'cpu':
        processes = min(PROCESSES, rounds // FEWEST_IN_A_PROCESS)
    if processes > 1:
        parts = [_timed_elsewhere(size, rounds // processes) for _ in range(processes)]
    else:
        parts = [_timed(size, rounds)]
    rows = []
    for title in TRAINED[size]:
        for name in METHODS:
            rows.append(_row(title, name, [part[title][name] for part in parts]))
    return rows


# Seconds that each dense step took, and each one beside it.
_Pairs = tuple[list[float], list[float]]
# For each model and method the pairs of steps that were waited for, and those of steps in loops.
_Times = dict[str, dict[str, tuple[_Pairs, _Pairs]]]


def _timed(size: str, rounds: int) -> _Times:
    return {title: dict(_timed_model(title, size, rounds)) for title in TRAINED[size]}


def _timed_model(title: str, size: str, rounds: int) -> Iterator[tuple[str, tuple[_Pairs, _Pairs]]]:
    model = TRAINED[size][title]
    dense = Training(model, METHODS['dense'])
    for name, method in METHODS.items():
        pair = dense, Training(model, method)
        waited = _pairs(pair, rounds)
        length = max(FEWEST_STEPS, round(LOOP_SECONDS / Timing(waited[0]).median))
        yield name, (waited, _pairs(pair, max(2, rounds // PAIRS_FOR_A_LOOP), length))


def _pairs(pair: tuple[Training, Training], rounds: int, length: int = 1) -> _Pairs:
    """Loops of so many steps, each of them waited for as a whole."""
    dense, other = pair
    calls = {
        'dense': functools.partial(_last_of, dense, length),
        'other': functools.partial(_last_of, other, length),
    }
    times = interleaved(calls, rounds)
    return _seconds_a_step(times['dense'], length), _seconds_a_step(times['other'], length)


def _seconds_a_step(loops: Timing, length: int) -> list[float]:
    return [seconds / length for seconds in loops.rounds]


def _last_of(training: Training, length: int) -> Any:
    """What the last of so many steps leaves, none of which is waited for."""
    for _ in range(length - 1):
        training()
    return training()


def _timed_elsewhere(size: str, rounds: int) -> _Times:
    command = [sys.executable, '-m', 'benchmarks.step', size, str(rounds)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _row(title: str, name: str, parts: list[tuple[_Pairs, _Pairs]]) -> Row:
    waited = _compared([waited for waited, _ in parts])
    looped = _compared([looped for _, looped in parts])
    limit = None
    if name in LIMITS:
        transformer_limit, mlp_limit = LIMITS[name]
        limit = mlp_limit if title.startswith('MLP') else transformer_limit
    return Row(f'{title}: {name}', (*waited, limit, *looped))


def _compared(parts: list[_Pairs]) -> tuple[float, Ratio, Ratio]:
    """Milliseconds, times the dense step, and the interval of the median of that."""
    dense, other = Timing([]), Timing([])
    for dense_times, other_times in parts:
        dense.rounds.extend(dense_times)
        other.rounds.extend(other_times)
    return other.milliseconds, ratio(other, dense), interval(other, dense, len(parts))


if __name__ == '__main__':
    print(json.dumps(_timed(sys.argv[1], int(sys.argv[2]))))
