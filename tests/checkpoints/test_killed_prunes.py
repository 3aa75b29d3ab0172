"""`prune` in real processes: killed at random moments, and two at once."""

import random
import shutil
import signal
import time

import pytest

from helpers import killed_prunes
from helpers.forked_processes import forking

KILLS = 4
RACES = 4


@pytest.fixture(scope='module')
def start():
    """Starts processes that have imported everything."""
    with forking() as context:

        def start_one(dense, out, sparsity=0.5):
            process = context.Process(
                target=killed_prunes.run, args=(str(dense), str(out), sparsity, f'{out}.log')
            )
            process.start()
            return process

        yield start_one


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp('dense') / 'shards'
    killed_prunes.write_dense(folder)
    return folder


def content(out):
    if not out.exists():
        return None
    files = [path for path in sorted(out.rglob('*')) if path.is_file()] if out.is_dir() else [out]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def finished(process):
    process.join()
    return process.exitcode


@pytest.mark.parametrize('source', ['file', 'shards'])
def test_a_prune_that_is_killed_leaves_nothing_or_all(source, start, dense, tmp_path):
    source = dense if source == 'shards' else dense / 'shard0.safetensors'
    draw, tensors = random.Random(0), killed_prunes.TENSORS
    assert finished(start(source, tmp_path / 'undisturbed')) == 0
    whole = content(tmp_path / 'undisturbed')
    for number in range(KILLS):
        out = tmp_path / f'out{number}'
        log, reached = tmp_path / f'out{number}.log', draw.randint(0, tensors // 2)
        victim = start(source, out)
        while victim.is_alive() and (
            not log.exists() or len(log.read_text().splitlines()) < reached
        ):
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
        victim.kill()
        assert finished(victim) in (-signal.SIGKILL, 0)
        assert content(out) in (None, whole)
        if out.is_dir():
            shutil.rmtree(out)
        assert finished(start(source, out)) == 0
        assert content(out) == whole
    left = {path.name for path in tmp_path.iterdir()}
    assert not [name for name in left if name.startswith('.')]


@pytest.mark.parametrize('source', ['file', 'shards'])
def test_two_prunes_into_one_target(source, start, dense, tmp_path):
    source = dense if source == 'shards' else dense / 'shard0.safetensors'
    wholes = []
    for sparsity in (0.5, 0.9):
        assert finished(start(source, tmp_path / f'{sparsity}', sparsity)) == 0
        wholes.append(content(tmp_path / f'{sparsity}'))
    for number in range(RACES):
        out = tmp_path / f'out{number}'
        (tmp_path / f'out{number}.new').write_text('a bystander')
        processes = [start(source, out, sparsity) for sparsity in (0.5, 0.9)]
        codes = [finished(process) for process in processes]
        assert 0 in codes
        assert set(codes) <= {0, 3}
        winners = [whole for whole, code in zip(wholes, codes, strict=True) if code == 0]
        assert content(out) in winners
        assert (tmp_path / f'out{number}.new').read_text() == 'a bystander'
    assert not [path for path in tmp_path.iterdir() if path.name.startswith('.')]
