"""The example that trains on blocks, with few steps: its tables, its picture, and what it refuses."""

import json

import pytest

import train_block_sparse as example

ARGUMENTS = ['--small', '--seeds', '0', '--no-progress']


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:block_sparse. blocks')
@pytest.mark.filterwarnings('ignore:.*looks like a bias or norm')
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


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:block_sparse. blocks')
@pytest.mark.filterwarnings('ignore:.*looks like a bias or norm')
def test_the_transformer_gets_curves_and_a_picture(tmp_path, capsys):
    image = tmp_path / 'curves.png'
    assert example.main([*ARGUMENTS, '--text', '--out', str(tmp_path), '--image', str(image)]) == 0
    assert [
        line.split('|')[1].strip() for line in capsys.readouterr().out.splitlines()[2:]
    ] == list(example.METHODS)
    assert image.stat().st_size > 10_000
    for path in tmp_path.glob('*.json'):
        result = json.loads(path.read_text())
        assert len(result['losses']) == len(result['seconds']) == 4


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--networks', 'resnet'], '--networks must be of lenet, wide, got resnet'),
        (['--seeds', '1', '1'], '--seeds must be different'),
        (['--sparsities', '1.0'], '--sparsities must lie between 0 and 1'),
        (['--steps', '1'], '--steps must be at least 2, got 1'),
        (['--image', 'curves.jpeg'], 'curves.jpeg'),
    ],
)
def test_wrong_settings_are_refused(arguments, message, capsys):
    assert example.main(arguments) == example.REFUSED
    assert message in capsys.readouterr().err
