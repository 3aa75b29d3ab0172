"""`inspect`, `prune`, `pack` and `unpack` as they are called."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from jaxpruner.checkpoints import open_checkpoint, write_safetensors
from jaxpruner.cli.main import main

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('COLUMNS', '80')
    tensors = {
        'mlp.up': RNG.standard_normal((64, 256)).astype(ml_dtypes.bfloat16),
        'norm[0]': np.ones(8, np.float32),
        'mlp.down': RNG.standard_normal((256, 64)).astype(np.float32),
    }
    write_safetensors('dense', tensors, {'format': 'pt'})
    return tmp_path


def run(line, capsys, status=0):
    capsys.readouterr()
    assert main(line.split()) == status
    return capsys.readouterr()


def words(text):
    return [' '.join(line.split()) for line in text.splitlines()]


def test_prune_then_inspect(capsys):
    line = 'prune dense --types *up=2:4 --sparsity 0.97 --out pruned'
    printed, errors = run(line, capsys)
    assert errors == ''
    first, *rows = words(printed)
    assert first.startswith('pruned: 2 of 3 tensors pruned, 24,084 of their 32,768 weights removed')
    assert rows == [
        'pruned: unstructured: 1 tensors, 16,384 weights, first mlp.down',
        'pruned: 2:4 along axis -1: 1 tensors, 16,384 weights, first mlp.up',
        'left: one dimension or none: 1 tensors, 8 weights, first norm[0]',
    ]

    shown = run('inspect pruned', capsys).out
    assert max(map(len, shown.splitlines())) <= 80
    assert 'mlp.up 64×256 bfloat16 50.00% 8,192 32.8 kB 18.4 kB' in words(shown)
    assert 'mlp.up 2:4 along axis 1' in words(shown)
    assert any(line.startswith('total 32,776 73.48% 8,692 98.3 kB') for line in words(shown))
    content = json.loads(run('inspect pruned --json', capsys).out)
    assert content['metadata'] == {'format': 'pt'}
    assert content['total']['weights'] == 32776
    (up,) = [leaf for leaf in content['leaves'] if leaf['name'] == 'mlp.up']
    assert (up['sparsity'], up['bytes'], up['format']) == (0.5, 32768, 'n_by_m')
    assert up['n_of_m'] == {'n': 2, 'm': 4, 'axis': 1}
    assert up['packed_bytes'] == 18432


def test_options_of_prune(capsys):
    dense = ('--types *up=dense *norm*=dense', '--types *up=dense --types *norm*=dense')
    for number, types in enumerate(dense):
        run(f'prune dense {types} --sparsity 0.5 --out skipped{number}', capsys)
        pruned = open_checkpoint(f'skipped{number}')
        zeros = {name for name in pruned.leaves if (pruned.read(name) == 0).any()}
        assert zeros == {'mlp.down'}
    run('prune dense --types 2:4 --out typed', capsys)  # for all, and needs no sparsity
    assert (open_checkpoint('typed').read('mlp.down') == 0).mean() == 0.5


def test_what_a_file_cannot_say_is_told(capsys):
    weights = np.arange(64.0).reshape(8, 8)
    tensors = dict.fromkeys(('dense/kernel', 'lm_head.weight', 'embed_tokens.weight'), weights)
    write_safetensors('model', tensors)
    shown = words(run('prune model --types 2:4 --out a', capsys).out)
    assert 'left: looks like an output head: 1 tensors, 64 weights, first lm_head.weight' in shown
    assert (
        'left: looks like an embedding: 1 tensors, 64 weights, first embed_tokens.weight' in shown
    )
    run('prune model --types lm_head*=nm_2,4,-2 *=dense --out b', capsys)
    assert (open_checkpoint('b').read('lm_head.weight') == 0).mean() == 0.5


REFUSED = {
    'inspect nowhere': 'nowhere: there is no such file or folder',
    'prune dense --sparsity 80 --out x': 'sparsity must lie in [0, 1]',
    'prune dense --sparsity 0.5 --types hed=2:4 --out x': "types: 'hed' matches no parameter",
    'prune dense --sparsity 0.5 --out dense': 'dense exists; choose another name',
    'pack dense --out dense': 'dense exists',
    'unpack dense --out x': 'dense is no packed file',
}


@pytest.mark.parametrize('line', REFUSED)
def test_refused_and_nothing_is_left(line, place, capsys):
    said = run(line, capsys, status=2)
    assert (said.out, said.err.count('\n')) == ('', 1)
    assert REFUSED[line] in said.err
    assert [file.name for file in place.iterdir()] == ['dense']


def test_pack_then_unpack(place, capsys):
    run('prune dense --types *up=2:4 --sparsity 0.97 --out pruned', capsys)
    shown = run('pack pruned --out packed', capsys)
    assert shown.err == ''
    assert re.match(r'packed: 3 leaves, 98.3 kB dense, .* packed \(.*%\)', shown.out)
    assert (place / 'packed').stat().st_size < 0.3 * (place / 'pruned').stat().st_size
    run('unpack packed --out unpacked', capsys)
    assert (place / 'unpacked').read_bytes() == (place / 'pruned').read_bytes()
    shown = [words(run(f'inspect {name}', capsys).out) for name in ('packed', 'pruned')]
    assert sorted(shown[0]) == sorted(shown[1])  # as what it was made of
    run('prune packed --sparsity 0.99 --out thinner', capsys)
    assert np.count_nonzero(open_checkpoint('thinner').read('mlp.down')) == 164
