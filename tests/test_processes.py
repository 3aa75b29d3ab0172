"""Two processes that share a mesh make the masks that one process makes, bit by bit."""

import math
import os
import pickle
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from helpers import two_processes

SECONDS = 240  # far more than it takes, and an end to processes that wait for each other
FLAG = '--xla_force_host_platform_device_count=2'


def free_port():
    try:
        with socket.socket() as listener:
            listener.bind(('localhost', 0))
            return listener.getsockname()[1]
    except OSError as error:
        pytest.skip(f'processes find each other through a port of localhost: {error}')


def start(files):
    environment = os.environ | {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {FLAG}'.strip(),
        'PYTHONPATH': os.pathsep.join(path for path in sys.path if path),
    }
    port, output = str(free_port()), {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    commands = [
        [sys.executable, two_processes.__file__, port, str(process), str(file)]
        for process, file in enumerate(files)
    ]
    return [subprocess.Popen(command, text=True, env=environment, **output) for command in commands]


def check_parts(parts, expected, name):
    """Each process holds half of an array, the halves make it whole, and it is the one expected."""
    held = [np.zeros(expected.shape, int) for _ in parts]
    for part, own in zip(parts, held, strict=True):
        for index, values in part:
            np.testing.assert_array_equal(values, expected[index], err_msg=str(name))
            own[index] = 1
    assert held[0].mean() == 0.5, name
    assert (held[0] + held[1] == 1).all(), name


def check_training(is_packed, history):
    """The training did what its name says: what two processes agree on is no accident."""
    steps = range(1, two_processes.STEPS + 1)
    zeros = []
    for layer, shapes in two_processes.SHAPES.items():
        mask = history[1, layer, 'masks']
        assert mask.size == math.prod(shapes['kernel']) // (8 if is_packed else 1)
        used = [history[step, layer, 'used'] == 0 for step in steps]
        assert any((earlier != used[-1]).any() for earlier in used[:-1]), 'masks change'
        zeros.append(used[-1].ravel())
    assert np.concatenate(zeros).mean() == pytest.approx(0.75, abs=0.01)


def test_two_processes_make_the_masks_of_one(tmp_path):
    files = [tmp_path / f'{process}.pickle' for process in range(2)]
    runs = start(files)
    try:
        # Meanwhile one process trains the same.
        expected = {case: two_processes.train(*case, None) for case in two_processes.CASES}
        expected = jax.tree.map(np.asarray, expected)
        printed = [run.communicate(timeout=SECONDS)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [run.returncode for run in runs] == [0, 0], '\n'.join(printed)
    written = [pickle.loads(file.read_bytes()) for file in files]
    for case, history in expected.items():
        check_training(case[1], history)
        for name, array in history.items():
            check_parts([by_case[case][name] for by_case in written], array, (case, name))
