"""A tiny sweep for tests, and what is looked at in its folder."""

import json

import numpy as np
import pytest

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.sweeps import Sweep, plan

WORKLOAD = WORKLOADS['lenet']
CHANGES = {
    'steps': 8,
    'eval_every': 0.5,
    'batch_size': 8,
    'model': {'hidden': [6]},
    'pruning': {'frequency': 0.2},
}
RECIPE = WORKLOAD.default('default').updated(CHANGES)
CELLS = plan(['no_prune', 'magnitude'], [0.8], [0, 1])
SEED_CELLS = CELLS[2:]


def content(out):
    """Everything that a sweep wrote, without times and the checksums of files that hold them."""
    found = {}
    for path in sorted(path for path in out.rglob('*') if path.is_file()):
        name = str(path.relative_to(out))
        if path.suffix == '.npz':
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tolist() for key in arrays}
        else:
            found[name] = path.read_text(errors='replace')
            if path.suffix == '.json':
                found[name] = {**json.loads(found[name]), 'seconds': None, 'checksum': None}
    return found


class Watch:
    """Counts chunks, and stops after some of them, as Ctrl-C does."""

    def __init__(self, stop_after=None):
        self.chunks, self.stop_after = [], stop_after

    def on_chunk(self, group, step):
        self.chunks.append((tuple(group), step))
        if len(self.chunks) == self.stop_after:
            raise KeyboardInterrupt


def stopped(digits, out, cells=SEED_CELLS):
    """A folder with the checkpoint of cells that are half done."""
    watch = Watch(stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        Sweep(WORKLOAD, RECIPE, digits, out).run(cells, watch.on_chunk)
    (checkpoint,) = (out / 'checkpoints').glob('*/*')
    return checkpoint


def chunks_of(digits, out, cells):
    watch = Watch()
    Sweep(WORKLOAD, RECIPE, digits, out).run(cells, watch.on_chunk)
    return watch.chunks
