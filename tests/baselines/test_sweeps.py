"""Sweeps: results, interruptions, damaged files, and the ways of training several cells."""

import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.tiny_sweeps import (
    CELLS,
    CHUNKS,
    RECIPE,
    SEED_CELLS,
    WORKLOAD,
    Watch,
    check_alike,
    chunks_of,
    content,
    stopped,
)
from jaxpruner.baselines import sweeps
from jaxpruner.baselines.checkpointing import CellKey, Checkpoints, Progress
from jaxpruner.baselines.programs import CompiledTraining, SharedPrograms
from jaxpruner.baselines.sweeps import Interrupted, Sweep, plan
from jaxpruner.cli import main as cli
from jaxpruner.report.results import read_cells


@pytest.fixture(scope='module', autouse=True)
def made_once():
    """All sweeps of a recipe share their programs, as if each process found them compiled."""
    commons, programs = {}, {}

    def shared_programs(workload, recipe, data, over):
        key = recipe.digest(), 'map' if over == 'each' else over  # which are the same programs
        return commons.setdefault(key, SharedPrograms(workload, recipe, data, over))

    def programs_of(common, algorithm):
        return programs.setdefault((common, algorithm), CompiledTraining(common, algorithm))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, 'SharedPrograms', shared_programs)
        patch.setattr(sweeps, 'CompiledTraining', programs_of)
        yield


@pytest.fixture(scope='module')
def digits():
    return WORKLOAD.data(RECIPE, None)


@pytest.fixture(scope='module')
def undisturbed(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed')
    Sweep(WORKLOAD, RECIPE, digits, out).run(CELLS)
    return out


def test_what_is_written(undisturbed):
    names = {cell.name for cell in CELLS}
    assert len(names) == 2 + 2
    assert {path.stem for path in undisturbed.glob('cells/*.json')} == names
    assert {path.stem for path in undisturbed.glob('masks/*.npz')} == {
        name for name in names if 'no_prune' not in name
    }
    assert not list((undisturbed / 'checkpoints').iterdir())
    assert (undisturbed / '.lock').exists()
    assert not list(undisturbed.rglob('*jaxpruner-tmp*'))
    for cell in read_cells(undisturbed):
        assert abs(cell.reached - cell.sparsity) < 0.01
        assert set(cell.layers) == {'dense1/kernel', 'dense2/kernel'}
        assert (cell.metric, cell.better, cell.steps, cell.recipe) == (
            'accuracy',
            'high',
            8,
            RECIPE.digest(),
        )
    with np.load(undisturbed / 'masks' / 'magnitude_0.8_0.npz') as masks:
        assert masks['steps'].tolist() == [0, 4, 8]
        assert masks['dense1/kernel'].shape == (3, 64, 6)
        assert masks['dense1/kernel'].dtype == np.uint8


def test_seeds_are_paired_and_differ(undisturbed):
    values = {cell.name: cell.metrics['loss'] for cell in read_cells(undisturbed)}
    assert len(set(values.values())) == len(values)


@pytest.mark.parametrize('over', [None, 'each'])
def test_stopped_after_every_chunk(over, undisturbed, digits, tmp_path):
    chunks = []
    for _ in range(100):
        watch = Watch(stop_after=1)
        try:
            Sweep(WORKLOAD, RECIPE, digits, tmp_path, over).run(
                CELLS, watch.on_chunk, watch.should_stop
            )
            chunks += watch.chunks
            break
        except Interrupted:
            chunks += watch.chunks
    assert len(chunks) == len(set(chunks)) == CHUNKS * (len(CELLS) if over == 'each' else 2)
    if over == 'each':  # another program may round otherwise
        check_alike(tmp_path, undisturbed, SEED_CELLS)
    else:
        assert content(tmp_path) == content(undisturbed)


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
                patch.setattr(Checkpoints, place, kill_before(getattr(Checkpoints, place), 2))
            try:
                sweep.run(CELLS, on_chunk)
                break
            except Killed:
                continue
    assert kills > 1
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
    assert {group for group, _ in watch.chunks} == {tuple(SEED_CELLS[1:])}


@pytest.mark.parametrize(
    'damage',
    [b'', b'{', b'[]', b'{"version": 0}', b'\xff', 'half', 'another cell'],
    ids=lambda damage: str(damage),
)
def test_a_corrupt_result_is_named_and_run_again(damage, digits, tmp_path):
    Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS)
    before = content(tmp_path)
    first, path = (tmp_path / 'cells' / f'{cell.name}.json' for cell in SEED_CELLS)
    whole = path.read_bytes()
    damaged = {'half': whole[: len(whole) // 2], 'another cell': first.read_bytes()}.get(
        damage, damage
    )
    path.write_bytes(damaged)
    with pytest.warns(
        UserWarning, match=r'magnitude_0\.8_1\.json is no result.*magnitude_0\.8_1\.json\.corrupt'
    ):
        assert {group for group, _ in chunks_of(digits, tmp_path, SEED_CELLS)} == {
            tuple(SEED_CELLS[1:])
        }
    assert path.with_suffix('.json.corrupt').read_bytes() == damaged
    after = {name: value for name, value in content(tmp_path).items() if 'corrupt' not in name}
    assert after.keys() == before.keys()


def test_a_cell_whose_masks_have_changed_is_run_again(digits, tmp_path):
    name = 'masks/magnitude_0.8_1.npz'
    Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.warns(
        UserWarning,
        match=rf'{name} has changed since .* now .*\.corrupt, and its cell runs again',
    ):
        assert {group for group, _ in chunks_of(digits, tmp_path, SEED_CELLS)} == {
            tuple(SEED_CELLS[1:])
        }
    assert (tmp_path / name).read_bytes() == whole


@pytest.mark.parametrize('damage', ['arrays', 'about', 'arrays are gone', 'everything is gone'])
def test_a_corrupt_checkpoint_is_named_and_its_cells_run_again(damage, digits, tmp_path):
    checkpoint = stopped(digits, tmp_path)
    for path in (
        checkpoint if damage == 'everything is gone' else checkpoint / damage.split()[0]
    ).rglob('*'):
        if path.is_file() and 'gone' in damage:
            path.unlink()
        elif path.is_file():
            path.write_bytes(path.read_bytes()[:3])
    with pytest.warns(
        UserWarning,
        match=rf'{checkpoint} cannot be resumed from.*it is now {checkpoint.name}\.corrupt',
    ):
        assert [step for _, step in chunks_of(digits, tmp_path, SEED_CELLS)] == [4, 8]
    assert list((tmp_path / 'checkpoints').glob('*/*')) == [
        checkpoint.with_name(checkpoint.name + '.corrupt')
    ]
    assert len(read_cells(tmp_path)) == 2


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_names_it(
    digits, tmp_path, monkeypatch, capfd
):
    save = Checkpoints.save

    def save_on_a_full_disk(*arguments):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Orbax spreads arrays over files as its threads happen to run; its list of them is one file of 3,316 bytes.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
        try:
            save(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    words = rf'{tmp_path}/checkpoints/magnitude_.*: the checkpoint cannot be written: .*; free'
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, 'save', save_on_a_full_disk)
        with pytest.raises(OSError, match=words):
            Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS)
    assert 'Traceback' not in capfd.readouterr().err
    assert chunks_of(digits, tmp_path, SEED_CELLS) == [
        (tuple(SEED_CELLS), 4),
        (tuple(SEED_CELLS), 8),
    ]


def test_other_cells_leave_a_checkpoint_alone(digits, tmp_path):
    stopped(digits, tmp_path)
    assert [step for _, step in chunks_of(digits, tmp_path, CELLS[:1])] == [4, 8]
    assert chunks_of(digits, tmp_path, SEED_CELLS) == [(tuple(SEED_CELLS), 8)]
    assert not list((tmp_path / 'checkpoints').iterdir())


def test_some_cells_of_a_checkpoint_go_on_without_the_others(undisturbed, digits, tmp_path):
    stopped(digits, tmp_path)
    for cell in reversed(SEED_CELLS):
        assert chunks_of(digits, tmp_path, [cell]) == [((cell,), 8)]
    assert not list((tmp_path / 'checkpoints').iterdir())
    check_alike(tmp_path, undisturbed, SEED_CELLS)


@pytest.mark.parametrize(('before', 'after'), [('map', 'each'), ('vmap', 'each'), ('each', 'map')])
def test_a_sweep_goes_on_in_another_way(before, after, undisturbed, digits, tmp_path):
    stopped(digits, tmp_path, over=before)
    done = {(cell, 4) for cell in (SEED_CELLS[:1] if before == 'each' else SEED_CELLS)}
    run = [
        (cell, step)
        for group, step in chunks_of(digits, tmp_path, SEED_CELLS, after)
        for cell in group
    ]
    assert len(run) == len(set(run))
    assert set(run) == {(cell, step) for cell in SEED_CELLS for step in (4, 8)} - done
    check_alike(tmp_path, undisturbed, SEED_CELLS)


def test_another_recipe_is_refused(undisturbed, digits):
    sweep = Sweep(WORKLOAD, RECIPE.updated({'steps': 10}), digits, undisturbed)
    with pytest.raises(
        ValueError,
        match=r"is another recipe \('steps = 8' there, 'steps = 10' now\).*another --out",
    ):
        sweep.run(CELLS)


def test_mappings_that_are_refused(digits, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="over each, map, vmap, devices, got 'pmap'"):
        Sweep(WORKLOAD, RECIPE, digits, tmp_path, 'pmap').run(CELLS)
    monkeypatch.setattr(jax, 'local_device_count', lambda: 1)
    with pytest.raises(ValueError, match="over 'devices' needs more than one device, here is 1"):
        Sweep(WORKLOAD, RECIPE, digits, tmp_path, 'devices').run(CELLS)


def test_tensorboard(digits, tmp_path):
    Sweep(WORKLOAD, RECIPE, digits, tmp_path, tensorboard=True).run(SEED_CELLS[:1])
    assert list((tmp_path / 'tensorboard' / SEED_CELLS[0].name).glob('events*'))


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

    carries = {
        'key': random.split(random.key(3), 2),
        'half': jnp.ones(3, jnp.bfloat16),
        'none': None,
    }
    checkpoints, cells = Checkpoints(tmp_path, 'identity'), [CellKey('set', 0.5, 0)]
    for step in (1, 2):
        checkpoints.save(
            Progress(cells, step, snapshots={'b/a': np.eye(2, dtype=np.uint8)}), carries
        )
    (begun,) = checkpoints.begun()
    progress, restored = checkpoints.restore(begun, cells, carries)
    assert progress.step == 2
    assert progress.snapshots['b/a'].tolist() == [[1, 0], [0, 1]]
    assert (random.key_data(restored['key']) == random.key_data(carries['key'])).all()
    assert restored['half'].dtype == jnp.bfloat16
    with pytest.warns(UserWarning, match='belongs to another recipe'):
        assert not Checkpoints(tmp_path, 'another').begun()


def test_what_is_no_checkpoint_stays_when_checkpoints_are_removed(tmp_path):
    checkpoints, cells = Checkpoints(tmp_path, 'identity'), [CellKey('set', 0.5, 0)]
    checkpoints.save(Progress(cells, step=1), {'w': jnp.ones(3)})
    (group,) = tmp_path.iterdir()
    (group / 'notes.txt').write_text('mine')
    checkpoints.clear(cells)
    assert [path.name for path in group.iterdir()] == ['notes.txt']


def test_ctrl_c_keeps_what_is_done(undisturbed, tmp_path, capsys, monkeypatch):
    recipe = tmp_path / 'recipe.toml'
    RECIPE.write(recipe)
    command = ['compare', 'lenet', '--recipe', str(recipe), '--out', str(tmp_path / 'out')]
    command += ['--algorithms', 'magnitude', '--sparsities', '0.8', '--seeds', '0', '1']
    save, presses = Checkpoints.save, [1, 2, 0, 0]

    def save_and_press(*arguments):
        save(*arguments)
        for _ in range(presses.pop(0)):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Checkpoints, 'save', save_and_press)
    assert cli.main(command) == 130
    printed = capsys.readouterr()
    assert 'goes on from there' in printed.out
    assert 'stopping after this chunk' in printed.err
    assert cli.main([*command, '--seeds', '0', '1', '2']) == 130  # pressed twice, at its last chunk
    assert cli.main(command) == 0
    assert '2 of 2 cells' in capsys.readouterr().out
    assert len(presses) == 2
    for cell in SEED_CELLS:
        name = f'cells/{cell.name}.json'
        assert content(tmp_path / 'out')[name] == content(undisturbed)[name]
