"""Each hostile checkpoint is one line that names the file, in the command line, and one clean error in Python."""

import contextlib
import os
import resource
import shutil
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.hostile_checkpoints import FILES, INDICES, make_index
from jaxpruner.checkpoints import choose, open_checkpoint, prune, write_safetensors
from jaxpruner.cli.main import main


def check_refused(path, out, capsys, named=None):
    """Both commands and the library refuse a checkpoint by name, and leave nothing where they would have written."""
    with pytest.raises((ValueError, OSError), match=(named or path).name):
        open_checkpoint(path)
    for arguments in (['inspect', path], ['prune', path, '--sparsity', '0.5', '--out', out]):
        assert main([str(argument) for argument in arguments]) == 2
        printed, said = capsys.readouterr()
        assert printed == ''
        assert said.count('\n') == 1, said
        assert said.startswith('jaxpruner: ')
        assert str(named or path) in said
        assert said.rstrip('\n').isprintable()
        assert len(said) < 1000
    assert not os.path.lexists(out)


def test_there_are_enough():
    assert len(FILES) >= 40
    assert len(INDICES) >= 25


@pytest.mark.parametrize('name', FILES)
def test_hostile_files(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'hostile.safetensors'
    FILES[name](path)
    named = tmp_path if name == 'a folder' else None  # in which there is no checkpoint
    check_refused(path, tmp_path / 'out', capsys, named)


@pytest.mark.parametrize('name', INDICES)
def test_hostile_indices(name, tmp_path, capsys):
    check_refused(make_index(tmp_path / 'hostile', name), tmp_path / 'out', capsys)


@contextlib.contextmanager
def as_a_user():
    """Nothing is forbidden to root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_is_forbidden(capsys):
    with tempfile.TemporaryDirectory() as name:  # every folder above which a user may enter
        place = Path(name)
        place.chmod(0o755)
        dense, secret, closed = (
            place / 'dense.safetensors',
            place / 'secret.safetensors',
            place / 'closed',
        )
        for path in (dense, secret):
            write_safetensors(path, {'w': np.arange(8.0).reshape(2, 4)})
        checkpoint = open_checkpoint(dense)  # loads everything while that is allowed
        prune(checkpoint, place / 'there', choose(checkpoint.leaves, 0.5))
        closed.mkdir()
        secret.chmod(0)
        closed.chmod(0)
        place.chmod(0o555)
        into = ['--sparsity', '0.5', '--overwrite', '--out']
        with as_a_user():
            for arguments in (
                ['inspect', secret],
                ['inspect', closed],
                ['inspect', closed / 'a'],
                ['prune', dense, *into, place / 'new'],
                ['prune', dense, *into, place / 'there'],
            ):
                assert main([str(argument) for argument in arguments]) == 2
                said = capsys.readouterr().err
                assert said.startswith(
                    'jaxpruner: [Errno 13] Permission denied; change its permissions, or name'
                )
                assert said.endswith(f": '{arguments[-1]}'\n")
        place.chmod(0o755)
        closed.chmod(0o755)


TARGETS = {
    'a folder': (lambda path: path.mkdir(), 'target'),
    'a pipe': (os.mkfifo, 'target'),
    'a link to itself': (lambda path: path.symlink_to(path), 'target'),
    'a device': (lambda path: path.symlink_to('/dev/full'), 'target'),
    'below a file': (lambda path: path.write_text('a file'), 'target/out'),
    'below nothing': (lambda path: None, 'target/out'),
    'a name of 300 letters': (lambda path: None, 't' * 300),
    'a name of 250 letters': (
        lambda path: None,
        't' * 250,
    ),  # which leaves no room for that of a lock
    'the kernel': (lambda path: path.symlink_to('/proc'), 'target/out'),
}


@pytest.mark.parametrize(('make', 'name'), TARGETS.values(), ids=TARGETS)
def test_hostile_targets(make, name, tmp_path, capsys):
    make(tmp_path / 'target')
    dense = tmp_path / 'dense.safetensors'
    write_safetensors(dense, {'w': np.arange(8.0).reshape(2, 4)})
    before = sorted(entry.name for entry in tmp_path.iterdir())
    out = tmp_path / name
    for option in ([], ['--overwrite']):
        assert main(['prune', str(dense), '--sparsity', '0.5', '--out', str(out), *option]) == 2
        printed, said = capsys.readouterr()
        assert (printed, said.count('\n')) == ('', 1)
        assert str(out) in said
        assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    checkpoint = open_checkpoint(dense)
    with pytest.raises(OSError, match=out.name):
        prune(checkpoint, out, choose(checkpoint.leaves, 0.5), overwrite=True)


def test_a_target_that_grows_too_large(tmp_path, capsys):
    dense, out = tmp_path / 'dense.safetensors', tmp_path / 'out'
    write_safetensors(dense, {'w': np.ones((64, 64))})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert main(['prune', str(dense), '--sparsity', '0.5', '--out', str(out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    remedy = 'name a place where larger files are allowed'
    assert capsys.readouterr().err == f"jaxpruner: [Errno 27] File too large; {remedy}: '{out}'\n"
    assert [path.name for path in tmp_path.iterdir()] == ['dense.safetensors']


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp('orbax') / 'saved'
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {'layer': {'kernel': np.arange(64.0).reshape(8, 8)}})
    return path


def damage(folder, glob, content=b'garbage'):
    found = [path for path in folder.glob(glob) if path.is_file()]
    assert found, glob
    for path in found:
        path.unlink()
        if content is not None:
            path.write_bytes(content)


DAMAGES = {
    'metadata are no JSON': lambda folder: damage(folder, '_METADATA'),
    'metadata are empty': lambda folder: damage(folder, '_METADATA', b''),
    'metadata are a list': lambda folder: damage(folder, '_METADATA', b'[]'),
    'metadata are deep': lambda folder: damage(folder, '_METADATA', b'[' * 100_000),
    'the manifest is garbage': lambda folder: damage(folder, 'manifest.ocdbt'),
    'the manifest is gone': lambda folder: damage(folder, 'manifest.ocdbt', None),
    'the arrays are garbage': lambda folder: damage(folder, '**/d/*'),
    'the arrays are gone': lambda folder: damage(folder, '**/d/*', None),
}


@pytest.mark.parametrize('change', DAMAGES.values(), ids=DAMAGES)
def test_damaged_orbax_folders(change, saved, tmp_path, capfd):
    folder = tmp_path / 'damaged'
    shutil.copytree(saved, folder)
    change(folder)
    check_refused(folder, tmp_path / 'out', capfd)
