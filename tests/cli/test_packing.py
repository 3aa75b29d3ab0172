"""`pack` and `unpack` as they are called, and packed files in `inspect` and `prune`."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from helpers import hostile_packed
from jaxpruner import sparse
from jaxpruner.checkpoints import open_checkpoint, write_safetensors
from jaxpruner.cli.main import main

RNG = np.random.default_rng(0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {
        'mlp.up': RNG.standard_normal((64, 256)).astype(ml_dtypes.bfloat16),
        'mlp.down': RNG.standard_normal((256, 64)).astype(np.float32),
        'norm[0]': np.ones(8, np.float32),
    }
    write_safetensors('dense.safetensors', tensors, {'format': 'pt'})
    arguments = ['--types', '*up=2:4', '--sparsity', '0.97', '--masks-out', 'masks.safetensors']
    assert main(['prune', 'dense.safetensors', *arguments, '--out', 'pruned.safetensors']) == 0
    return tmp_path


def run(line, capsys, status=0):
    capsys.readouterr()
    assert main(line.split()) == status
    return capsys.readouterr()


def test_pack_then_unpack(place, capsys):
    shown = run('pack pruned.safetensors --out packed.safetensors', capsys)
    assert shown.err == ''
    assert shown.out.startswith('packed.safetensors: 3 leaves, 98.3 kB dense, ')
    rows = [line.split()[:2] for line in shown.out.splitlines()[3:]]
    assert rows == [['dense', '1'], ['N:M', '1'], ['CSR', '1']]
    size = (place / 'packed.safetensors').stat().st_size
    assert size < 0.3 * (place / 'pruned.safetensors').stat().st_size

    run('unpack packed.safetensors --out unpacked.safetensors', capsys)
    unpacked, pruned = (
        (place / f'{name}.safetensors').read_bytes() for name in ('unpacked', 'pruned')
    )
    assert unpacked == pruned  # bit by bit, metadata and all
    assert sparse.load('packed.safetensors')['mlp.up'].dtype == ml_dtypes.bfloat16


def test_masks_of_prune_are_kept(place, capsys):
    pruned = open_checkpoint('pruned.safetensors')
    tensors = {name: pruned.read(name) for name in pruned.leaves}
    tensors['mlp.down'][:, ::2] = 0  # regrown at zero
    write_safetensors('regrown.safetensors', tensors)
    run('pack regrown.safetensors --masks masks.safetensors --out packed.safetensors', capsys)
    stored = sparse.open_packed('packed.safetensors').stored_mask('mlp.down')
    np.testing.assert_array_equal(stored, open_checkpoint('masks.safetensors').read('mlp.down'))


def test_packed_files_are_inspected_and_pruned_as_what_they_were(place, capsys):
    run('pack pruned.safetensors --out packed.safetensors', capsys)
    shown = [
        run(f'inspect {name}.safetensors', capsys).out.splitlines() for name in ('packed', 'pruned')
    ]
    assert sorted(shown[0]) == sorted(shown[1])
    heading = next(line for line in shown[0] if line.endswith('smallest'))
    assert heading.split() == 'leaf dense N:M blocks CSR a bit each smallest'.split()
    assert any(line.startswith('mlp.up') and line.endswith('N:M') for line in shown[0])
    leaves = json.loads(run('inspect packed.safetensors --json', capsys).out)['leaves']
    (up,) = [leaf for leaf in leaves if leaf['name'] == 'mlp.up']
    assert up['smallest'] == 'n_by_m'
    assert up['formats']['n_by_m'] == up['formats']['bitmask'] == 18432
    run('prune packed.safetensors --sparsity 0.99 --out thinner.safetensors', capsys)
    assert np.count_nonzero(open_checkpoint('thinner.safetensors').read('mlp.down')) == 164


REFUSED = {
    'pack nowhere.safetensors --out x': 'nowhere.safetensors: there is no such file',
    'pack dense.safetensors --out dense.safetensors': 'dense.safetensors exists; .*--overwrite',
    'pack dense.safetensors --out no/x': 'there is no folder no',
    'pack dense.safetensors --masks none --out x': 'none: there is no such file',
    'pack dense.safetensors --masks masks.safetensors --out x': 'mlp.*: .* weights that the mask',
    'pack dense.safetensors --masks foreign.safetensors --out x': "--masks: 'w' is no tensor of",
    'pack packed.safetensors --out x': 'packed.safetensors is packed already',
    'unpack dense.safetensors --out x': 'dense.safetensors is no packed file',
    'unpack packed.safetensors --out dense.safetensors': 'dense.safetensors exists; .*--overwrite',
}


@pytest.mark.parametrize('line', REFUSED)
def test_refused(line, place, capsys):
    run('pack pruned.safetensors --out packed.safetensors', capsys)
    write_safetensors('foreign.safetensors', {'w': np.ones(2)})
    said = run(line, capsys, status=2)
    assert said.out == ''
    assert said.err.count('\n') == 1
    assert re.search(REFUSED[line], said.err), said.err
    assert not (place / 'x').exists()


@pytest.mark.parametrize('name', hostile_packed.FILES)
def test_hostile_packed_files(name, tmp_path, capsys):
    path = tmp_path / 'hostile.safetensors'
    hostile_packed.FILES[name][0](path)
    assert main(['unpack', str(path), '--out', str(tmp_path / 'out')]) == 2
    printed, said = capsys.readouterr()
    assert printed == ''
    assert said.count('\n') == 1, said
    assert said.startswith('jaxpruner: ')
    assert 'hostile.safetensors' in said
    assert len(said) < 1000
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_dtypes_that_no_dense_file_holds(tmp_path, capsys):
    path = tmp_path / 'packed.safetensors'
    sparse.save(path, {'a': np.eye(4).astype(ml_dtypes.int4)})
    said = run(f'unpack {path} --out {tmp_path / "out"}', capsys, status=2).err
    assert 'a has dtype int4' in said
