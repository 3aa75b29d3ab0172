"""A folder of results belongs to one recipe, and to one process at a time."""

import os
import subprocess
import sys

import pytest

from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.sweep_folder import claimed
from jaxpruner.core import file_locks

RECIPE = Recipe('resnet')
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], 'a')
fcntl.flock(file, fcntl.LOCK_EX)
print('process 7 on another', file=file, flush=True)
print('locked', flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_share_a_folder(tmp_path):
    command = [sys.executable, '-c', HOLDER, str(tmp_path / '.lock')]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with (
            pytest.raises(
                ValueError,
                match=r'process 7 on another is writing to .*: wait until it has finished, or',
            ),
            claimed(tmp_path, RECIPE),
        ):
            pass
        assert not (tmp_path / 'recipe.toml').exists()
        process.kill()
    with claimed(tmp_path, RECIPE):
        assert (tmp_path / '.lock').read_text().startswith(f'process {os.getpid()} on ')
    assert (tmp_path / '.lock').read_text() == ''


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, 'No locks available')

    monkeypatch.setattr(file_locks.fcntl, 'flock', no_locks)
    with (
        pytest.warns(
            UserWarning,
            match=r'cannot be locked \(.*No locks available\): see to it that no other process',
        ),
        claimed(tmp_path, RECIPE),
    ):
        pass


def test_another_recipe_or_a_damaged_one_is_refused(tmp_path):
    with claimed(tmp_path, RECIPE):
        pass
    with (
        pytest.raises(
            ValueError,
            match=r"is another recipe \('steps = 1000' there, 'steps = 10' now\).*another --out",
        ),
        claimed(tmp_path, RECIPE.updated({'steps': 10})),
    ):
        pass
    (tmp_path / 'recipe.toml').write_text('steps = [')
    with pytest.raises(ValueError, match=r'recipe\.toml'), claimed(tmp_path, RECIPE):
        pass
