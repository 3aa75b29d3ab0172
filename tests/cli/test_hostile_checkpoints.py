"""Hostile checkpoints and targets: one line that names them, and nothing is left where the output would be."""

import os

import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.hostile_checkpoints import FILES  # all of them where they are read
from jaxpruner.checkpoints import write_safetensors
from jaxpruner.cli.main import main


def check_refused(source, out, named, capfd, *options):
    before = sorted(entry.name for entry in source.parent.iterdir())
    arguments = ['prune', source, '--sparsity', '0.5', '--out', out, *options]
    assert main(list(map(str, arguments))) == 2
    printed, said = capfd.readouterr()
    assert (printed, said.count('\n')) == ('', 1), said
    assert str(named) in said
    assert said.rstrip('\n').isprintable()
    assert len(said) < 1000
    assert sorted(entry.name for entry in source.parent.iterdir()) == before


def test_a_hostile_file(tmp_path, capfd):
    path = tmp_path / 'hostile.safetensors'
    next(iter(FILES.values()))(path)
    check_refused(path, tmp_path / 'out', path, capfd)


def test_a_damaged_orbax_folder(tmp_path, capfd):
    folder = tmp_path / 'damaged'
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {'layer': {'kernel': np.arange(64.0).reshape(8, 8)}})
    (folder / '_METADATA').write_bytes(b'garbage')
    check_refused(folder, tmp_path / 'out', folder, capfd)


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
    check_refused(dense, out, out, capfd, '--overwrite')
