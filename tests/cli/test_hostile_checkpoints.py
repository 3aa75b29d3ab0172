"""Each hostile checkpoint and target is one line that names it, in the command line, and one clean error in Python."""

import linecache
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.hostile_checkpoints import FILES, INDICES, make_index
from jaxpruner.checkpoints import open_checkpoint, write_safetensors
from jaxpruner.cli.main import main


def check_refused(path, out, capsys, named=None):
    """A command and the library refuse a checkpoint by name, and leave nothing where they would have written."""
    with pytest.raises((ValueError, OSError), match=(named or path).name):
        open_checkpoint(path)
    assert main(['prune', str(path), '--sparsity', '0.5', '--out', str(out)]) == 2
    printed, said = capsys.readouterr()
    assert (printed, said.count('\n')) == ('', 1), said
    assert str(named or path) in said
    assert said.rstrip('\n').isprintable()
    assert len(said) < 1000
    assert not os.path.lexists(out)


@pytest.mark.parametrize('name', [*FILES][::3])  # all of them where they are read
def test_hostile_files(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'hostile.safetensors'
    FILES[name](path)
    named = tmp_path if name == 'a folder' else None  # in which there is no checkpoint
    check_refused(path, tmp_path / 'out', capsys, named)


@pytest.mark.parametrize('name', [*INDICES][::3])
def test_hostile_indices(name, tmp_path, capsys):
    check_refused(make_index(tmp_path / 'hostile', name), tmp_path / 'out', capsys)


def test_what_is_forbidden(capsys, monkeypatch):
    # The oldest tyro reads Python's own source again, which may lie where root alone may read.
    monkeypatch.setattr(linecache, 'checkcache', lambda filename=None: None)
    with tempfile.TemporaryDirectory() as name:  # every folder above which a user may enter
        place = Path(name)
        place.chmod(0o755)
        dense, secret = place / 'dense.safetensors', place / 'secret.safetensors'
        for path in (dense, secret):
            write_safetensors(path, {'w': np.arange(8.0).reshape(2, 4)})
        prune = ['prune', dense, '--sparsity', '0.5', '--overwrite', '--out', place / 'there']
        for command in (prune, ['inspect', dense]):
            assert main(list(map(str, command))) == 0  # loads everything while that is allowed
        capsys.readouterr()
        secret.chmod(0)
        place.chmod(0o555)
        is_root = not os.geteuid()  # to whom nothing is forbidden
        if is_root:
            os.seteuid(65534)
        try:
            for arguments in (['inspect', secret], prune, [*prune[:-1], place / 'new']):
                assert main(list(map(str, arguments))) == 2
                said = capsys.readouterr().err
                remedy = 'change its permissions, or name another place'
                start = f'jaxpruner: [Errno 13] Permission denied; {remedy}'
                assert said == f"{start}: '{arguments[-1]}'\n"
        finally:
            if is_root:
                os.seteuid(0)
            place.chmod(0o755)


TARGETS = {
    'a folder': (lambda path: path.mkdir(), 'target'),
    'a pipe': (os.mkfifo, 'target'),
    'a device': (lambda path: path.symlink_to('/dev/full'), 'target'),
    'below nothing': (lambda path: None, 'target/out'),
    'a name of 250 letters': (lambda path: None, 't' * 250),  # too long for that of a lock
}


@pytest.mark.parametrize(('make', 'name'), TARGETS.values(), ids=TARGETS)
def test_hostile_targets(make, name, tmp_path, capsys):
    make(tmp_path / 'target')
    dense, out = tmp_path / 'dense.safetensors', tmp_path / name
    write_safetensors(dense, {'w': np.arange(8.0).reshape(2, 4)})
    before = sorted(entry.name for entry in tmp_path.iterdir())
    command = ['prune', str(dense), '--sparsity', '0.5', '--out', str(out), '--overwrite']
    assert main(command) == 2
    printed, said = capsys.readouterr()
    assert (printed, said.count('\n')) == ('', 1)
    assert str(out) in said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp('orbax') / 'saved'
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {'layer': {'kernel': np.arange(64.0).reshape(8, 8)}})
    return path


DAMAGES = {
    'metadata are no JSON': ('_METADATA', b'garbage'),
    'the arrays are garbage': ('**/d/*', b'garbage'),
    'the arrays are gone': ('**/d/*', None),
}


@pytest.mark.parametrize(('glob', 'content'), DAMAGES.values(), ids=DAMAGES)
def test_damaged_orbax_folders(glob, content, saved, tmp_path, capfd):
    folder = tmp_path / 'damaged'
    shutil.copytree(saved, folder)
    files = [path for path in folder.glob(glob) if path.is_file()]
    assert files
    for path in files:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    check_refused(folder, tmp_path / 'out', capfd)
