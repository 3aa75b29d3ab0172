"""Sweeps in real processes: killed at random moments, and on several devices."""

import random
import signal
import time

import numpy as np
import pytest

from helpers import killed_sweeps
from helpers.forked_processes import forking
from jaxpruner.report.results import read_cells

KILLS = 6


@pytest.fixture
def process():
    """Makes processes that have imported everything and find their programs compiled, on two devices."""
    with forking() as context:

        def make(out, over=None):
            started = context.Process(target=killed_sweeps.run, args=(str(out), f'{out}.log', over))
            started.start()
            return started

        yield make


def lines(out):
    log = out.with_name(f'{out.name}.log')
    return log.read_text().splitlines() if log.exists() else []


def results(out):
    """What a sweep wrote of its cells, without times."""
    found = {
        cell.name: (cell.value, cell.metrics, cell.reached, cell.layers) for cell in read_cells(out)
    }
    for path in out.glob('masks/*.npz'):
        with np.load(path) as arrays:
            found[path.name] = {key: arrays[key].tolist() for key in arrays}
    return found


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_random_moments(process, tmp_path):
    undisturbed, out, draw = tmp_path / 'undisturbed', tmp_path / 'killed', random.Random(0)
    whole = process(undisturbed)
    whole.join()
    assert whole.exitcode == 0
    seconds_a_chunk = sum(cell.seconds for cell in read_cells(undisturbed)) / (
        2 * killed_sweeps.CHUNKS
    )
    written = {}
    for _ in range(KILLS):
        reached = len(lines(out)) + draw.randint(0, 2)
        victim = process(out)
        while len(lines(out)) < reached and victim.is_alive():
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 2 * seconds_a_chunk))
        victim.kill()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        for path in out.glob('cells/*.json'):
            assert written.setdefault(path.name, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
    last = process(out)
    last.join()
    assert last.exitcode == 0
    # A chunk is told of after it was saved: none was trained again, and a kill between the two leaves one untold.
    told, all_chunks = lines(out), lines(undisturbed)
    assert len(all_chunks) == 2 * killed_sweeps.CHUNKS
    assert len(told) == len(set(told)) >= len(all_chunks) - KILLS
    assert set(told) <= set(all_chunks)
    assert all(
        (out / 'cells' / name).stat().st_mtime_ns == moment for name, moment in written.items()
    )
    assert results(out) == results(undisturbed)
    assert not list((out / 'checkpoints').iterdir())
    assert not list(out.rglob('*.corrupt')) + list(out.rglob('*jaxpruner-tmp*'))
    spread = process(tmp_path / 'spread', 'devices')
    spread.join()
    assert spread.exitcode == 0
    for cell, mapped in zip(read_cells(tmp_path / 'spread'), read_cells(undisturbed), strict=True):
        assert cell.layers == mapped.layers
        assert abs(cell.value - mapped.value) < 1.5 / 450
