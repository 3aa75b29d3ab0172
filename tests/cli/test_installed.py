"""The installed command as a shell calls it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxpruner
from jaxpruner.checkpoints import write_safetensors

COMMAND = shutil.which('jaxpruner', path=Path(sys.executable).parent)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMMAND is None, reason='there is no command jaxpruner beside this Python: pip install -e .'
    ),
]


@pytest.mark.parametrize(
    ('line', 'status', 'words'),
    [
        ('prune --help', 0, '--masks-out'),
        ('--tyro-print-completion bash', 0, '--masks-out'),
        ('inspect model.safetensors', 0, '93.75%'),
        ('prune model.safetensors --sparsity 0.5 --out o', 0, 'o: 1 of 1 tensors pruned'),
        ('compare digits-lenet --preset data', 2, ''),
    ],
)
def test_what_a_command_prints(line, status, words, tmp_path):
    write_safetensors(tmp_path / 'model.safetensors', {'kernel': np.eye(16, dtype=np.float32)})
    source = str(Path(jaxpruner.__file__).parents[1])
    run = subprocess.run(
        [str(COMMAND), *line.split()],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': source, 'PYTHONIOENCODING': 'utf-8'},
        capture_output=True,
        encoding='utf-8',
        check=False,
    )
    assert run.returncode == status
    assert words in run.stdout
    assert '\x1b' not in run.stdout
    assert run.stderr.count('\n') == bool(status)
