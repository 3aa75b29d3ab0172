"""Two processes that share a mesh make the masks that one process makes, bit by bit."""

import itertools
import math
import os
import pickle
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import two_processes

PROCESSES = 2
SECONDS = 240  # far more than it takes, and an end to processes that wait for each other
FLAG = '--xla_force_host_platform_device_count=2'


def free_port():
    try:
        with socket.socket() as listener:
            listener.bind(('localhost', 0))
            return listener.getsockname()[1]
    except OSError as error:
        pytest.skip(
            f'processes find each other through a port of localhost, and none can be opened here: {error}'
        )


def start(group, directory):
    environment = os.environ | {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {FLAG}'.strip(),
        'PYTHONPATH': os.pathsep.join(path for path in sys.path if path),
    }
    port = free_port()
    runs = []
    for process in range(PROCESSES):
        arguments = [str(port), str(process), group, str(directory / f'{process}.pickle')]
        command = [sys.executable, two_processes.__file__, *arguments]
        with (directory / f'{process}.log').open('w') as log:
            runs.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
    return runs


def results(runs, directory):
    """What the processes wrote; where one fails, the others wait in vain and are ended."""
    end = time.monotonic() + SECONDS
    while (
        any(run.poll() is None for run in runs)
        and not any(run.poll() for run in runs)
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    logs = '\n'.join((directory / f'{process}.log').read_text() for process in range(PROCESSES))
    assert [run.poll() for run in runs] == [0] * PROCESSES, (
        f'{[run.poll() for run in runs]}\n{logs}'
    )
    return [
        pickle.loads((directory / f'{process}.pickle').read_bytes()) for process in range(PROCESSES)
    ]


def check_parts(parts, expected, name):
    """Each process holds half of an array, the halves make it whole, and it is the one expected."""
    holders = np.zeros(expected.shape, int)
    for part in parts:
        held = np.zeros(expected.shape, bool)
        for index, values in part:
            np.testing.assert_array_equal(values, expected[index], err_msg=str(name))
            held[index] = True
        assert held.mean() == 1 / PROCESSES, name
        holders += held
    assert (holders == 1).all(), name


def put_together(parts, expected):
    array = np.empty_like(expected)
    for index, values in itertools.chain(*parts):
        array[index] = values
    return array


def unpacked(mask, name):
    _, layer, _ = name
    kernel = jnp.zeros(two_processes.SHAPES[layer]['kernel'])
    return np.asarray(jaxpruner.unpack_masks(jnp.asarray(mask), kernel))


def check_training(case, history):
    """The training did what its name says: what two processes agree on is no accident."""
    _, is_packed, _ = case
    for layer, shapes in two_processes.SHAPES.items():
        masks = [history[step + 1, layer, 'masks'] for step in range(two_processes.STEPS)]
        assert masks[0].size == math.prod(shapes['kernel']) // (8 if is_packed else 1)
        used = [history[step + 1, layer, 'used'] != 0 for step in range(two_processes.STEPS)]
        assert any((earlier != used[-1]).any() for earlier in used[:-1]), 'masks change'
    last = [history[two_processes.STEPS, layer, 'used'] != 0 for layer in two_processes.SHAPES]
    assert np.concatenate(last, axis=None).mean() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    'group',
    ['packed', pytest.param('real', marks=pytest.mark.slow)],
)
def test_two_processes_make_the_masks_of_one(group, tmp_path):
    runs = start(group, tmp_path)
    try:
        # Meanwhile one process trains the same.
        expected = {case: two_processes.train(case, None) for case in two_processes.GROUPS[group]}
        expected = jax.tree.map(np.asarray, expected)
        written = results(runs, tmp_path)
    finally:
        for run in runs:
            run.kill()
            run.wait()
    for case, history in expected.items():
        check_training(case, history)
        for name, array in history.items():
            parts = [by_case[case][name] for by_case in written]
            if case != two_processes.REAL:
                check_parts(parts, array, (case, name))
                continue
            # Devices sum gradients in another order.
            other = put_together(parts, array)
            if name[2] == 'masks':
                array, other = unpacked(array, name), unpacked(other, name)
            assert np.isclose(array, other, rtol=1e-3, atol=1e-4).mean() > 0.99, name
