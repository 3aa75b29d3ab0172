"""Sweeps: results, interruptions, damaged files, and the ways of training several cells."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.baselines import WORKLOADS, sweeps
from jaxpruner.baselines.checkpointing import Checkpoints, Progress
from jaxpruner.baselines.programs import choose_over
from jaxpruner.baselines.sweeps import CellKey, Interrupted, Sweep, plan
from jaxpruner.report.results import read_cells

pytestmark = pytest.mark.usefixtures('compiled_once')

WORKLOAD = WORKLOADS['lenet']
CHANGES = {'steps': 8, 'eval_every': 0.5, 'batch_size': 8, 'model': {'hidden': [6]}, 'pruning': {'frequency': 0.2}}
RECIPE = WORKLOAD.default('default').updated(CHANGES)
CELLS = plan(['no_prune', 'set'], [0.8], [0, 1])
CHUNKS = 2
SEED_CELLS = plan(['magnitude'], [0.5], [0, 1])


@pytest.fixture(scope='module')
def digits():
    return WORKLOAD.data(RECIPE, None)


@pytest.fixture(scope='module')
def undisturbed(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed')
    Sweep(WORKLOAD, RECIPE, digits, out).run(CELLS)
    return out


def content(out):
    """Everything that a sweep wrote, without times."""
    found = {}
    for path in sorted(path for path in out.rglob('*') if path.is_file()):
        name = str(path.relative_to(out))
        if path.suffix == '.npz':
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tolist() for key in arrays}
        else:
            found[name] = path.read_text()
            if path.suffix == '.json':
                found[name] = {**json.loads(found[name]), 'seconds': None}
    return found


class Watch:
    """Counts chunks and asks to stop after some of them."""

    def __init__(self, stop_after=None):
        self.chunks, self.stop_after = [], stop_after

    def on_chunk(self, group, step):
        self.chunks.append((tuple(group), step))

    def should_stop(self):
        return self.stop_after is not None and len(self.chunks) >= self.stop_after


def test_what_is_written(undisturbed):
    names = {cell.name for cell in CELLS}
    assert len(names) == 2 + 2
    assert {path.stem for path in undisturbed.glob('cells/*.json')} == names
    assert {path.stem for path in undisturbed.glob('metrics/*.jsonl')} == names
    assert {path.stem for path in undisturbed.glob('masks/*.npz')} == {name for name in names if 'no_prune' not in name}
    assert not list((undisturbed / 'checkpoints').iterdir())
    assert not list(undisturbed.rglob('*.new'))
    for cell in read_cells(undisturbed):
        assert abs(cell.reached - cell.sparsity) < 0.01
        assert set(cell.layers) == {'dense1/kernel', 'dense2/kernel'}
        assert (cell.metric, cell.better, cell.steps, cell.recipe) == ('accuracy', 'high', 8, RECIPE.digest())
        lines = (undisturbed / 'metrics' / f'{cell.name}.jsonl').read_text().splitlines()
        assert [json.loads(line)['step'] for line in lines] == [4, 8]
        assert json.loads(lines[-1])['accuracy'] == cell.value
    with np.load(undisturbed / 'masks' / 'set_0.8_0.npz') as masks:
        assert masks['steps'].tolist() == [0, 4, 8]
        assert masks['dense1/kernel'].shape == (3, 64, 6)
        assert masks['dense1/kernel'].dtype == np.uint8


def test_seeds_are_paired_and_differ(undisturbed):
    values = {cell.name: cell.metrics['loss'] for cell in read_cells(undisturbed)}
    assert len(set(values.values())) == len(values)


@pytest.mark.parametrize('over', ['map', 'each'])
def test_stopped_after_every_chunk(over, undisturbed, digits, tmp_path):
    chunks = []
    for _ in range(100):
        watch = Watch(stop_after=1)
        try:
            Sweep(WORKLOAD, RECIPE, digits, tmp_path, over).run(CELLS, watch.on_chunk, watch.should_stop)
            chunks += watch.chunks
            break
        except Interrupted:
            chunks += watch.chunks
    assert len(chunks) == len(set(chunks)) == CHUNKS * (2 if over == 'map' else len(CELLS))
    if over == 'map':  # another program may round otherwise
        assert content(tmp_path) == content(undisturbed)
    else:
        assert content(tmp_path).keys() == content(undisturbed).keys()


class Killed(BaseException):
    """Nothing that the sweep could catch."""


@pytest.mark.parametrize('place', ['write_cell', 'on_chunk', 'save', 'clear'])
def test_killed_at_every_place(place, undisturbed, digits, tmp_path, monkeypatch):
    kills = 0

    def kill_before(function, every):
        calls = [0]

        def killing(*arguments, **keywords):
            nonlocal kills
            calls[0] += 1
            if calls[0] == every:
                kills += 1
                raise Killed
            return function(*arguments, **keywords)

        return killing

    sweep = Sweep(WORKLOAD, RECIPE, digits, tmp_path)
    for _ in range(40):
        with monkeypatch.context() as patch:
            on_chunk = kill_before(lambda *_: None, 2) if place == 'on_chunk' else lambda *_: None
            if place == 'write_cell':
                patch.setattr(sweeps, place, kill_before(sweeps.write_cell, 2))
            elif place != 'on_chunk':
                patch.setattr(Checkpoints, place, kill_before(getattr(Checkpoints, place), 2 if place == 'save' else 1))
            try:
                sweep.run(CELLS, on_chunk)
                break
            except Killed:
                continue
    assert kills > 1
    # Where the last removal was cut off, the checkpoint of finished cells is left; it is not taken up.
    for path in (tmp_path / 'checkpoints').iterdir():
        assert place == 'clear'
        for file in sorted(path.rglob('*'), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()
    assert content(tmp_path) == content(undisturbed)


def test_finished_cells_are_not_run_again(undisturbed, digits):
    before, watch = content(undisturbed), Watch()
    Sweep(WORKLOAD, RECIPE, digits, undisturbed).run(CELLS, watch.on_chunk)
    assert not watch.chunks
    assert content(undisturbed) == before


def test_more_cells_can_be_added(digits, tmp_path):
    sweep, watch = Sweep(WORKLOAD, RECIPE, digits, tmp_path), Watch()
    sweep.run(SEED_CELLS[:1])
    sweep.run(SEED_CELLS, watch.on_chunk)
    assert {group for group, _ in watch.chunks} == {(CellKey('magnitude', 0.5, 1),)}


def test_a_corrupt_result_is_named_and_run_again(digits, tmp_path):
    sweep = Sweep(WORKLOAD, RECIPE, digits, tmp_path)
    sweep.run(SEED_CELLS)
    before = content(tmp_path)
    path = tmp_path / 'cells' / 'magnitude_0.5_1.json'
    path.write_text('{')
    with pytest.warns(UserWarning, match=r'magnitude_0\.5_1\.json'):
        sweep.run(SEED_CELLS)
    assert path.with_suffix('.json.corrupt').exists()
    assert {name: value for name, value in content(tmp_path).items() if 'corrupt' not in name} == before


@pytest.mark.parametrize('damage', ['arrays', 'about'])
def test_a_corrupt_checkpoint_is_named_and_its_cells_run_again(damage, digits, tmp_path):
    watch = Watch(stop_after=1)
    with pytest.raises(Interrupted):
        Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS, watch.on_chunk, watch.should_stop)
    (checkpoint,) = (tmp_path / 'checkpoints').iterdir()
    for path in (checkpoint / damage).rglob('*'):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:3])
    with pytest.warns(UserWarning, match='cannot be resumed from'):
        Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS)
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == [checkpoint.name + '.corrupt']
    assert len(read_cells(tmp_path)) == 2


def test_a_checkpoint_of_other_cells_is_not_taken_up(digits, tmp_path):
    watch = Watch(stop_after=1)
    sweep = Sweep(WORKLOAD, RECIPE, digits, tmp_path)
    with pytest.raises(Interrupted):
        sweep.run(plan(['set'], [0.5], [0, 1]), watch.on_chunk, watch.should_stop)
    again = Watch()
    sweep.run(plan(['rigl'], [0.5], [0, 1]), again.on_chunk)
    assert [step for _, step in again.chunks] == [4, 8]


def test_another_recipe_is_refused(undisturbed, digits):
    sweep = Sweep(WORKLOAD, RECIPE.updated({'steps': 10}), digits, undisturbed)
    with pytest.raises(ValueError, match=r"is another recipe \('steps = 8' there, 'steps = 10' now\).*another --out"):
        sweep.run(CELLS)


def test_the_ways_of_training_agree(digits, tmp_path):
    cells = plan(['rigl'], [0.5, 0.8], [0])
    for over in ('map', 'vmap', 'each'):
        Sweep(WORKLOAD, RECIPE, digits, tmp_path / over, over).run(cells)
    results = {over: content(tmp_path / over) for over in ('map', 'vmap', 'each')}
    for over in ('vmap', 'each'):
        for cell in cells:
            name = f'masks/{cell.name}.npz'
            assert results[over][name]['dense1/kernel'][:2] == results['map'][name]['dense1/kernel'][:2]
            value, mapped = (results[o][f'cells/{cell.name}.json']['value'] for o in (over, 'map'))
            assert abs(value - mapped) < 1.5 / 450


def test_the_fastest_way_is_measured(digits):
    assert choose_over(WORKLOAD, RECIPE, digits, 2) in ('map', 'vmap', 'each')


def test_tensorboard(digits, tmp_path):
    Sweep(WORKLOAD, RECIPE, digits, tmp_path, tensorboard=True).run(SEED_CELLS[:1])
    assert list((tmp_path / 'tensorboard' / 'magnitude_0.5_0').glob('events*'))


@pytest.mark.parametrize(
    ('algorithms', 'sparsities', 'seeds', 'message'),
    [
        (['sett'], [0.5], [0], "algorithm 'sett' is unknown; did you mean 'set'"),
        (['set'], [80.0], [0], r'sparsity must lie in \[0, 1\]'),
        (['set'], [0.5], [-1], 'a seed must be a whole number from 0'),
    ],
)
def test_plans_that_are_refused(algorithms, sparsities, seeds, message):
    with pytest.raises(ValueError, match=message):
        plan(algorithms, sparsities, seeds)


def test_a_checkpoint_keeps_keys_and_dtypes(tmp_path):
    from jax import random

    carries = {'key': random.split(random.key(3), 2), 'half': jnp.ones(3, jnp.bfloat16), 'none': None}
    checkpoints = Checkpoints(tmp_path, 'identity')
    for step in (1, 2):
        checkpoints.save(Progress([('set', 0.5, 0)], step, snapshots={'b/a': np.eye(2, dtype=np.uint8)}), carries)
    progress, restored = checkpoints.restore(carries)
    assert progress.step == 2
    assert progress.snapshots['b/a'].tolist() == [[1, 0], [0, 1]]
    assert (random.key_data(restored['key']) == random.key_data(carries['key'])).all()
    assert restored['half'].dtype == jnp.bfloat16
    with pytest.warns(UserWarning, match='belongs to another recipe'):
        assert Checkpoints(tmp_path, 'another').latest() is None


COMMAND = """
import sys, tyro
from jaxpruner.cli.compare import Compare
sys.exit(tyro.cli(Compare).run())
"""


@pytest.mark.slow
def test_signals(undisturbed, tmp_path):
    options = ['lenet', '--algorithms', 'set', '--sparsities', '0.5', '--seeds', '0', '1', '--out', str(tmp_path)]
    changes = ['steps=3000', 'eval_every=0.02', 'batch_size=8', 'model.hidden=[6]']
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}

    def start():
        command = [sys.executable, '-c', COMMAND, *options, '--set', *changes]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for_checkpoint(after):
        while not any(path.name.isdigit() and path.name > after for path in Path(tmp_path).glob('checkpoints/*')):
            assert process.poll() is None, process.communicate()
        return max(path.name for path in Path(tmp_path).glob('checkpoints/*') if path.name.isdigit())

    process = start()
    reached = wait_for_checkpoint('')
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start()
    wait_for_checkpoint(reached)
    process.send_signal(signal.SIGINT)
    printed = process.communicate()
    assert process.returncode == 130, printed
    assert 'goes on from there' in printed[0]
    assert 'stopping after this chunk' in printed[1]
    process = start()
    printed = process.communicate()
    assert process.returncode == 0, printed
    assert '2 of 2 cells' in printed[0]
    assert len(read_cells(tmp_path)) == 2
