"""The installed command as a shell calls it: output, errors, statuses, pipes, Ctrl-C. Each call starts JAX."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxpruner
from helpers.made_up_cells import make_cells
from jaxpruner.checkpoints import write_safetensors
from jaxpruner.cli.commands import COMMANDS
from jaxpruner.report import write_cell

COMMAND = shutil.which('jaxpruner', path=Path(sys.executable).parent)
TINY = '--set steps=4 eval_every=1.0 batch_size=8 model.hidden=[4]'
VALUES = {
    ('no_prune', 0.0): [0.99, 0.98],
    ('rigl', 0.8): [0.95, 0.96],
    ('random', 0.8): [0.9, 0.91],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMMAND is None, reason='there is no command jaxpruner beside this Python: pip install -e .'
    ),
]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp('place')
    write_safetensors(folder / 'model.safetensors', {'kernel': np.eye(16, dtype=np.float32)})
    for cell in make_cells(VALUES):
        write_cell(folder / 'my results', cell)
    (folder / 'my results' / 'cells' / 'set_0.8_0.json').write_bytes(b'\xff')
    return folder


def start(place, line):
    """Starts `jaxpruner LINE` where the checkpoint and the results lie, with the package that the tests import."""
    source = str(Path(jaxpruner.__file__).parents[1])
    return subprocess.Popen(
        [str(COMMAND), *shlex.split(line)],
        cwd=place,
        env={**os.environ, 'PYTHONPATH': source, 'PYTHONIOENCODING': 'utf-8'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding='utf-8',
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.parametrize('command', COMMANDS)
def test_help(place, command):
    status, out, err = finish(start(place, f'{command} --help'))
    assert (status, err) == (0, '')
    assert out.startswith(f'usage: jaxpruner {command}')
    assert '\x1b' not in out


CALLS = {
    'inspect': ('inspect model.safetensors', ['kernel', '16×16', '93.75%'], ''),
    'prune': (
        'prune model.safetensors --sparsity 0.5 --out "a b.safetensors"',
        ['a b.safetensors: 1 of 1 tensors pruned'],
        '',
    ),
    'run': (
        f'run digits-lenet --algorithm random {TINY} --out trained',
        ['1 of 1 cells are in trained'],
        '',
    ),
    'table': (
        'table "my results"',
        ['resnet', '(digits):', 'accuracy', '95.50 ± 0.71'],
        'jaxpruner: warning: my results/cells/set_0.8_0.json is no result of this version: ',
    ),
    'order': ('order "my results"', ['of 3 pairs 3 agree'], 'jaxpruner: warning: '),
    'plot': ('plot "my results" --out "a b.png"', ['a b.png'], 'jaxpruner: warning: '),
}


@pytest.mark.parametrize(('line', 'words', 'said'), CALLS.values(), ids=CALLS)
def test_what_a_command_prints(place, line, words, said):
    status, out, err = finish(start(place, line))
    assert status == 0, err
    for word in words:
        assert word in out
    assert '\x1b' not in out
    assert err.startswith(said)
    assert err.count('\n') == bool(said)


def test_an_error_is_one_line(place):
    status, out, err = finish(start(place, 'compare digits-lenet --preset data'))
    assert (status, out, err.count('\n')) == (2, '', 1)
    assert err.startswith('jaxpruner: digits-lenet trains on digits, but')


def test_completion(place):
    status, out, err = finish(start(place, '--tyro-print-completion bash'))
    assert (status, err) == (0, '')
    assert all(word in out for word in (*COMMANDS, '--sparsities', '--masks-out'))


def test_a_pipe_may_close_early(place):
    process = start(place, 'table "my results"')
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    status, _, err = finish(process)
    assert (status, err.count('\n')) == (0, 1)  # of the corrupt cell


def test_ctrl_c_keeps_what_is_done(place):
    options = '--algorithms no_prune random --seeds 0 --out begun --set batch_size=8 model.hidden=[4] eval_every=0.01'
    process = start(place, f'compare digits-lenet {options} steps=100000')
    end = time.monotonic() + 120
    while (
        not list(place.glob('begun/checkpoints/*/*'))
        and process.poll() is None
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130
    assert 'the same command goes on from there' in out
    assert err == 'jaxpruner: stopping after this chunk of steps; again to stop at once\n'
