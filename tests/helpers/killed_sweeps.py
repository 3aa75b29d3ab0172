"""A sweep in a process of its own, for tests that kill it: what is imported here is imported once, then forked."""

import os
import pathlib

import sklearn.datasets  # noqa: F401 (takes a second, and is otherwise imported where digits are read)

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.sweeps import Sweep, plan

WORKLOAD = WORKLOADS['lenet']
CHUNKS = 30
RECIPE = WORKLOAD.default('default').updated(
    {
        'steps': 60,
        'eval_every': 1 / CHUNKS,
        'batch_size': 8,
        'model': {'hidden': [4]},
        'pruning': {'frequency': 0.1},
    }
)
CELLS = plan(['no_prune', 'magnitude'], [0.8], [0, 1, 2])


def run(out, log, over=None):
    """Runs the sweep in a folder and adds a line to a file after each chunk."""

    def on_chunk(group, step):
        with pathlib.Path(log).open('a') as file:
            file.write(f'{step} {" ".join(cell.name for cell in group)}\n')

    Sweep(WORKLOAD, RECIPE, WORKLOAD.data(RECIPE, None), pathlib.Path(out), over).run(
        CELLS, on_chunk
    )
    os._exit(0)  # what JAX's threads would do at the end of a fork is of no interest
