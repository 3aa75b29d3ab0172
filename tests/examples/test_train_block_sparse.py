"""The example that trains on blocks, with few steps: its tables, its picture, and what it refuses."""

import json

import pytest

import train_block_sparse as example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings('ignore:block_sparse. blocks'),
    pytest.mark.filterwarnings('ignore:.*looks like a bias or norm'),
]
ARGUMENTS = ['--small', '--seeds', '0', '--no-progress']


def test_methods_train_as_many_weights_and_a_second_run_trains_nothing(
    tmp_path, capsys, monkeypatch
):
    arguments = [*ARGUMENTS, '--out', str(tmp_path), '--networks', 'lenet', '--sparsities', '0.9']
    assert example.main(arguments) == 0
    found = capsys.readouterr().out
    rows = [line.strip('| ').split(' | ') for line in found.splitlines()[2:]]
    assert [row[2] for row in rows] == ['dense', 'blocks', 'masks']
    assert rows[1][-1] == rows[2][-1] != rows[0][-1]
    results = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert {result['method'] for result in results} == set(example.METHODS)

    monkeypatch.setattr(example, 'train', lambda *_: pytest.fail('it was done before'))
    assert example.main(arguments) == 0
    assert capsys.readouterr().out == found


def test_the_transformer_gets_curves_and_a_picture(tmp_path, capsys):
    image = tmp_path / 'curves.png'
    assert example.main([*ARGUMENTS, '--text', '--out', str(tmp_path), '--image', str(image)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split('|')[1].strip() for row in rows] == list(example.METHODS)
    assert image.stat().st_size > 10_000
    for path in tmp_path.glob('*.json'):
        result = json.loads(path.read_text())
        assert len(result['losses']) == len(result['seconds']) == 4
