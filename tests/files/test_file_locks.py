"""A lock is held by one process at a time, whatever its path is called, and ends with it."""

import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import jaxpruner
from jaxpruner.files.file_locks import locked

SOURCE = str(Path(jaxpruner.__file__).parents[1])


def spelled_differently(folder, name):
    (folder / 'link').symlink_to(folder)
    return [
        folder / '..' / folder.name / name,
        folder / 'link' / name,
        Path(os.path.relpath(folder / name)),
    ]


def is_locked_for_others(lock):
    code = 'import sys; from pathlib import Path; from jaxpruner.files.file_locks import locked'
    code += '; path = Path(sys.argv[1])'
    code += "\nwith locked(path, path): print('free')"
    environment = {**os.environ, 'PYTHONPATH': SOURCE}
    command = [sys.executable, '-c', code, str(lock)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0 or 'BlockingIOError' in run.stderr
    return run.returncode != 0


def test_a_lock_holds_however_its_path_is_written(tmp_path):
    lock = tmp_path / '.lock'
    with locked(lock, tmp_path):
        for path in spelled_differently(tmp_path, '.lock'):
            with (
                pytest.raises(BlockingIOError, match='another thread'),
                locked(path, tmp_path),
            ):
                pass
        assert lock.read_text().startswith('process')  # closing a file of that name frees no lock
        assert is_locked_for_others(lock)
    assert not is_locked_for_others(lock)


@pytest.mark.skipif(sys.platform == 'win32', reason='no processes are forked there')
def test_a_forked_process_does_not_keep_a_lock(tmp_path):
    lock = tmp_path / '.lock'
    context = multiprocessing.get_context('fork')
    ends = context.Event()
    with locked(lock, tmp_path), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that other threads are not there in the fork
        child = context.Process(target=ends.wait)
        child.start()
    with locked(lock, tmp_path):
        pass
    ends.set()
    child.join()
