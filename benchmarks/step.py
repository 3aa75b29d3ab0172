"""Training steps against dense ones: Adam, donated buffers, masks at a sparsity of 0.9.

Each is timed in pairs with the dense step. Dense against a copy of itself, compiled apart, says what is noise. Where
memory comes to lie differs from process to process, and short steps with it: on a CPU several processes take a part of
the pairs each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import jax

from benchmarks.models import TRAINED
from benchmarks.report import Row
from benchmarks.timing import Timing, interleaved, interval, ratio
from benchmarks.training import METHODS, Training

ROUNDS = 200
PROCESSES, FEWEST_IN_A_PROCESS = 5, 20
COLUMNS = ('milliseconds', 'times the dense step', 'interval of the median', 'limit')
# What the lower end of the interval has to stay below, for the transformer and for the MLP, whose step is short.
LIMITS = {
    'magnitude, host-driven': (1.01, 1.03),
    'magnitude, in-graph': (1.03, 1.05),
    'magnitude, in-graph, packed': (1.03, 1.05),
    'RigL, host-driven': (1.01, 1.03),
    'RigL, in-graph': (1.06, 1.12),
    'straight-through magnitude': (1.12, 1.40),
    'magnitude, an update due': (1.5, 1.5),
}

# A step takes its temporaries anew. glibc would have the kernel map them and take them back each time, which takes a
# fifth of a dense step here.
_KEEP_MEMORY = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(2**40), 'MALLOC_TOP_PAD_': str(2**28)}


def environment() -> Mapping[str, str]:
    """What a process needs to keep the memory of a step for the next, if this one does not."""
    return {} if jax.default_backend() != 'cpu' or _KEEP_MEMORY.keys() <= os.environ.keys() else _KEEP_MEMORY


def run(size: str, rounds: int) -> list[Row]:
    """Times the steps of each model by each method."""
    processes = min(PROCESSES, rounds // FEWEST_IN_A_PROCESS) if jax.default_backend() == 'cpu' else 1
    if processes > 1:
        parts = [_timed_elsewhere(size, rounds // processes) for _ in range(processes)]
    else:
        parts = [_timed(size, rounds)]
    return [_row(title, name, [part[title][name] for part in parts]) for title in TRAINED[size] for name in METHODS]


# For each model and method the times of the dense steps and of those beside them.
_Times = dict[str, dict[str, tuple[list[float], list[float]]]]


def _timed(size: str, rounds: int) -> _Times:
    return {title: dict(_timed_model(title, size, rounds)) for title in TRAINED[size]}


def _timed_model(title: str, size: str, rounds: int) -> Iterator[tuple[str, tuple[list[float], list[float]]]]:
    model = TRAINED[size][title]
    dense = Training(model, METHODS['dense'])
    for name, method in METHODS.items():
        times = interleaved({'dense': dense, 'other': Training(model, method)}, rounds)
        yield name, (times['dense'].rounds, times['other'].rounds)


def _timed_elsewhere(size: str, rounds: int) -> _Times:
    command = [sys.executable, '-m', 'benchmarks.step', size, str(rounds)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _row(title: str, name: str, parts: list[tuple[list[float], list[float]]]) -> Row:
    dense, other = (Timing([time for part in parts for time in part[side]]) for side in (0, 1))
    limit = LIMITS[name][title.startswith('MLP')] if name in LIMITS else None
    ratios = ratio(other, dense), interval(other, dense, len(parts))
    return Row(f'{title}: {name}', (other.milliseconds, *ratios, limit))


if __name__ == '__main__':
    print(json.dumps(_timed(sys.argv[1], int(sys.argv[2]))))
