"""Hostile targets: one line that names them, and nothing is left where the output would be."""

import os

import numpy as np
import pytest

from jaxpruner.checkpoints import write_safetensors
from jaxpruner.cli.main import main

TARGETS = {
    'a folder': (lambda path: path.mkdir(), 'target'),
    'a pipe': (os.mkfifo, 'target'),
    'below nothing': (lambda path: None, 'target/out'),
    'a name of 250 letters': (lambda path: None, 't' * 250),  # too long for that of a lock
}


@pytest.mark.parametrize(('make', 'name'), TARGETS.values(), ids=TARGETS)
def test_hostile_targets(make, name, tmp_path, capfd):
    make(tmp_path / 'target')
    dense, out = tmp_path / 'dense.safetensors', tmp_path / name
    write_safetensors(dense, {'w': np.arange(8.0).reshape(2, 4)})
    before = sorted(entry.name for entry in tmp_path.iterdir())
    arguments = ['prune', dense, '--sparsity', '0.5', '--out', out, '--overwrite']
    assert main(list(map(str, arguments))) == 2
    printed, said = capfd.readouterr()
    assert (printed, said.count('\n')) == ('', 1), said
    assert str(out) in said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
