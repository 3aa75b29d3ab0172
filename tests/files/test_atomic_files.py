"""Files and folders appear whole or not at all, whatever happens to who writes them."""

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jaxpruner
from jaxpruner.files import atomic_files

SOURCE = str(Path(jaxpruner.__file__).parents[1])


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def write(path, text='whole'):
    atomic_files.replace_file(path, lambda temporary: temporary.write_text(text))


def fill_folder(path):
    with atomic_files.replacing(path, is_folder=True) as folder:
        (folder / 'inside').write_text('whole')


@pytest.mark.parametrize(
    ('before', 'error'), [(None, OSError('broken')), ('earlier', KeyboardInterrupt())]
)
def test_a_failed_write_leaves_what_was_there(tmp_path, before, error):
    path = tmp_path / 'a.txt'
    if before:
        path.write_text(before)

    def fail(temporary):
        temporary.write_text('half')
        raise error

    with pytest.raises(type(error)):
        atomic_files.replace_file(path, fail)
    assert names(tmp_path) == (['a.txt'] if before else [])
    assert not before or path.read_text() == before


def test_the_next_writer_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    others = ['a.txt.new', '.a.txt.1234.jaxpruner-tmp', '.b.txt.0123456789abcdef.jaxpruner-tmp']
    for name in [*others, '.a.txt.0123456789abcdef.jaxpruner-tmp']:
        (tmp_path / name).write_text(name)
    (tmp_path / '.a.txt.0123456789abcdee.jaxpruner-tmp').mkdir()
    with atomic_files.target_claimed(tmp_path / 'a.txt'):
        write(tmp_path / 'a.txt')
    assert names(tmp_path) == sorted([*others, 'a.txt'])
    atomic_files.remove_strays(tmp_path)
    assert names(tmp_path) == sorted([*others[:2], 'a.txt'])


@pytest.mark.parametrize('place', ['folder', 'pipe', 'loop'])
def test_only_files_are_replaced(tmp_path, place):
    path = tmp_path / place
    makers = {'folder': path.mkdir, 'pipe': lambda: os.mkfifo(path)}
    makers.get(place, lambda: path.symlink_to(path))()
    with pytest.raises(OSError, match=place):
        write(path)
    assert names(tmp_path) == [place]


def test_what_must_not_be_replaced_is_kept_when_it_comes_meanwhile(tmp_path):
    for path, is_folder in ((tmp_path / 'a', False), (tmp_path / 'b', True)):
        with (
            pytest.raises(FileExistsError, match='exists; choose another'),
            atomic_files.replacing(path, overwrite=False, is_folder=is_folder),
        ):
            path.write_text('theirs')
        assert path.read_text() == 'theirs'
    assert names(tmp_path) == ['a', 'b']


@pytest.mark.parametrize('call', [write, fill_folder])
def test_errors_of_the_system_name_the_target(tmp_path, monkeypatch, call):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match=r'No space left on device.*a\.txt') as error:
        call(tmp_path / 'a.txt')
    assert error.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


HOLDER = """
import sys
from pathlib import Path
from jaxpruner.files import atomic_files
with atomic_files.target_claimed(Path(sys.argv[1])):
    print('claimed', flush=True)
    sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(tmp_path):
    path = tmp_path / 'a.txt'
    command = [sys.executable, '-c', HOLDER, str(path)]
    environment = {**os.environ, 'PYTHONPATH': SOURCE}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        words = r'another process is writing to .*a\.txt: wait until it has finished, or'
        with pytest.raises(BlockingIOError, match=words), atomic_files.target_claimed(path):
            pass
        process.kill()
    assert names(tmp_path) == ['.a.txt.lock']
    with atomic_files.target_claimed(path):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize('mode', [0o600, 0o444])
def test_a_link_stays_and_its_file_is_replaced_with_its_permissions(tmp_path, mode):
    (tmp_path / 'there').mkdir()
    file, link = tmp_path / 'there' / 'a.txt', tmp_path / 'link'
    file.write_text('earlier')
    file.chmod(mode)
    link.symlink_to(Path('there', 'a.txt'))
    meanwhile = []

    def watch(temporary):
        temporary.write_text('whole')
        meanwhile.append(stat.S_IMODE(temporary.stat().st_mode))

    atomic_files.replace_file(link, watch)
    assert link.is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ('whole', mode)
    assert meanwhile[0] | mode == mode | 0o200  # what is private is so from the beginning
    assert names(file.parent) == ['a.txt']


def test_threads_do_not_share_a_claim(tmp_path):
    def claim():
        with atomic_files.target_claimed(tmp_path / 'a.txt'):
            pass

    with (
        ThreadPoolExecutor(1) as thread,
        atomic_files.target_claimed(tmp_path / 'a.txt'),
        pytest.raises(BlockingIOError),
    ):
        thread.submit(claim).result()
    claim()
    assert names(tmp_path) == []
