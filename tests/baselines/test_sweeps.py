"""Sweeps: results, interruptions, damaged files, and a folder that belongs to one recipe and one process at a time."""

import contextlib
import resource
import signal

import numpy as np
import pytest

from helpers.tiny_sweeps import (
    CELLS,
    RECIPE,
    SEED_CELLS,
    WORKLOAD,
    chunks_of,
    content,
    stopped,
)
from jaxpruner.baselines import sweeps
from jaxpruner.baselines.checkpointing import Checkpoints
from jaxpruner.baselines.programs import Programs
from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.baselines.sweeps import Sweep, claimed, keep_recipe
from jaxpruner.cli import main as cli
from jaxpruner.report.results import read_cells


@pytest.fixture(scope='module', autouse=True)
def made_once():
    """All sweeps of a recipe share their programs, as if each process found them compiled."""
    made = {}

    def programs(workload, recipe, data):
        return made.setdefault(recipe.digest(), Programs(workload, recipe, data))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, 'Programs', programs)
        yield


@pytest.fixture(scope='module')
def digits():
    return WORKLOAD.data(RECIPE, None)


@pytest.fixture(scope='module')
def undisturbed(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed')
    Sweep(WORKLOAD, RECIPE, digits, out).run(CELLS)
    return out


def test_what_is_written(undisturbed, digits):
    names = {cell.name for cell in CELLS}
    assert {path.stem for path in undisturbed.glob('cells/*.json')} == names
    kept = {path.stem for path in undisturbed.glob('masks/*.npz')}
    assert kept == {name for name in names if 'no_prune' not in name}
    assert not list((undisturbed / 'checkpoints').iterdir())
    assert not list(undisturbed.rglob('*jaxpruner-tmp*'))
    cells = read_cells(undisturbed)
    assert len({cell.metrics['loss'] for cell in cells}) == len(names)
    for cell in cells:
        assert abs(cell.reached - cell.sparsity) < 0.01
        assert set(cell.layers) == {'dense1/kernel', 'dense2/kernel'}
        assert (cell.metric, cell.better, cell.steps) == ('accuracy', 'high', 8)
        assert cell.recipe == RECIPE.digest()
    with np.load(undisturbed / 'masks' / 'magnitude_0.8_0.npz') as masks:
        assert masks['steps'].tolist() == [0, 4, 8]
        assert masks['dense1/kernel'].shape == (3, 64, 6)
        assert masks['dense1/kernel'].dtype == np.uint8
    before = content(undisturbed)
    assert not chunks_of(digits, undisturbed, CELLS)  # finished cells are not run again
    assert content(undisturbed) == before


class Killed(BaseException):
    """Nothing that the sweep could catch."""


def test_killed_before_a_result_is_written(undisturbed, digits, tmp_path, monkeypatch):
    write_cell, kills = sweeps.write_cell, [False, True] * len(CELLS)

    def write_or_die(*arguments):
        if kills.pop():
            raise Killed
        write_cell(*arguments)

    monkeypatch.setattr(sweeps, 'write_cell', write_or_die)
    while kills:
        with contextlib.suppress(Killed):
            Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(CELLS)
    assert content(tmp_path) == content(undisturbed)


def test_a_damaged_result_is_named_and_run_again(digits, tmp_path):
    Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS)
    path = tmp_path / 'cells' / f'{SEED_CELLS[1].name}.json'
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=rf'{path.name} is no result.*{path.name}\.corrupt'):
        groups = {group for group, _ in chunks_of(digits, tmp_path, SEED_CELLS)}
    assert groups == {tuple(SEED_CELLS[1:])}
    assert path.with_name(f'{path.name}.corrupt').read_bytes() == whole[: len(whole) // 2]
    assert len(read_cells(tmp_path)) == 2


@pytest.mark.parametrize('damage', ['arrays', 'everything is gone'])
def test_a_corrupt_checkpoint_is_named_and_its_cells_run_again(damage, digits, tmp_path):
    checkpoint = stopped(digits, tmp_path)
    damaged = checkpoint if damage == 'everything is gone' else checkpoint / damage
    for path in damaged.rglob('*'):
        if path.is_file() and 'gone' in damage:
            path.unlink()
        elif path.is_file():
            path.write_bytes(path.read_bytes()[:3])
    words = rf'{checkpoint} cannot be resumed from.*it is now {checkpoint.name}\.corrupt'
    with pytest.warns(UserWarning, match=words):
        assert [step for _, step in chunks_of(digits, tmp_path, SEED_CELLS)] == [4, 8]
    aside = checkpoint.with_name(checkpoint.name + '.corrupt')
    assert list((tmp_path / 'checkpoints').glob('*/*')) == [aside]
    assert len(read_cells(tmp_path)) == 2


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_names_it(
    digits, tmp_path, monkeypatch
):
    save = Checkpoints.save

    def save_on_a_full_disk(*arguments):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            save(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    words = rf'{tmp_path}/checkpoints/magnitude_.*: the checkpoint cannot be written: .*; free'
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, 'save', save_on_a_full_disk)
        with pytest.raises(OSError, match=words):
            Sweep(WORKLOAD, RECIPE, digits, tmp_path).run(SEED_CELLS)
    assert [step for _, step in chunks_of(digits, tmp_path, SEED_CELLS)] == [4, 8]


def test_tensorboard(digits, tmp_path):
    Sweep(WORKLOAD, RECIPE, digits, tmp_path, tensorboard=True).run(SEED_CELLS[:1])
    assert list((tmp_path / 'tensorboard' / SEED_CELLS[0].name).glob('events*'))


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
    assert 'goes on from there' in capsys.readouterr().out
    assert cli.main([*command, '--seeds', '0', '1', '2']) == 130  # pressed twice, at its last chunk
    assert cli.main(command) == 0
    assert '2 of 2 cells' in capsys.readouterr().out
    assert len(presses) == 2
    for cell in SEED_CELLS:
        name = f'cells/{cell.name}.json'
        assert content(tmp_path / 'out')[name] == content(undisturbed)[name]


SMALL = Recipe('resnet')


def test_two_processes_do_not_share_a_folder(tmp_path):
    words = 'another process is writing to .*: wait until it has finished, or .* to another --out'
    for _ in range(2):  # it is free again
        with (
            claimed(tmp_path, SMALL),
            pytest.raises(ValueError, match=words),
            claimed(tmp_path, SMALL),
        ):
            pass
    assert not (tmp_path / 'recipe.toml').exists()


@pytest.mark.parametrize('made', ['cells/set_0.8_0.json', 'checkpoints/set_1a/00000/about/x'])
def test_another_recipe_or_a_damaged_one_is_refused_once_a_cell_has_begun(made, tmp_path):
    other = SMALL.updated({'steps': 10})
    with claimed(tmp_path, SMALL):
        keep_recipe(tmp_path, SMALL)
    with claimed(tmp_path, other):
        keep_recipe(tmp_path, other)
    assert read_recipe(tmp_path / 'recipe.toml', SMALL) == other
    (tmp_path / made).parent.mkdir(parents=True)
    (tmp_path / made).touch()
    words = r"is another recipe \('steps = 10' there, 'steps = 1000' now\).*another --out"
    with pytest.raises(ValueError, match=words), claimed(tmp_path, SMALL):
        pass
    (tmp_path / 'recipe.toml').write_text('steps = [')
    with pytest.raises(ValueError, match=r'recipe\.toml'), claimed(tmp_path, SMALL):
        pass
