"""Training steps against dense ones: Adam, donated buffers, masks at a sparsity of 0.9.

Each is timed in pairs with the dense step. Dense against a copy of itself, compiled apart, says what is noise.
"""

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
