"""Training steps against dense ones: Adam, donated buffers, masks at a sparsity of 0.9.

Each is timed in pairs with the dense step. Dense against a copy of itself, compiled apart, says what is noise.
"""

import os
from collections.abc import Mapping

import jax

from benchmarks.models import TRAINED, Model
from benchmarks.report import Row
from benchmarks.timing import interleaved, interval, ratio
from benchmarks.training import METHODS, Training

ROUNDS = 200
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
    return [row for title, model in TRAINED[size].items() for row in _rows(title, model, rounds)]


def _rows(title: str, model: Model, rounds: int) -> list[Row]:
    dense = Training(model, METHODS['dense'])
    rows = []
    for name, method in METHODS.items():
        times = interleaved({'dense': dense, 'other': Training(model, method)}, rounds)
        ratios = ratio(times['other'], times['dense']), interval(times['other'], times['dense'])
        limit = LIMITS[name][title.startswith('MLP')] if name in LIMITS else None
        rows.append(Row(f'{title}: {name}', (times['other'].milliseconds, *ratios, limit)))
    return rows
