"""The example that removes channels while a network trains: its results, what it keeps, and what it refuses."""

import json

import pytest

import shrink_cnn as example

ARGUMENTS = ['--steps', '50', '--seeds', '0', '--no-progress']


@pytest.mark.slow
def test_a_quarter_of_the_flops_stays_and_nothing_changes_when_channels_go(
    tmp_path, capsys, monkeypatch
):
    arguments = [*ARGUMENTS, '--out', str(tmp_path)]
    assert example.main(arguments) == 0
    table = capsys.readouterr().out
    for name in example.ROWS.values():
        assert f'| {name} |' in table
    (path,) = tmp_path.glob('*.json')
    result = json.loads(path.read_text())
    assert 0.15 < result['flops'] <= 0.25
    assert result['other predictions'] == 0
    assert result['loaded'] == pytest.approx(result['accuracy']['pruned'], abs=0.003)
    assert result['accuracy']['dense'] > 0.5

    monkeypatch.setattr(example.Experiment, 'run', lambda *_: pytest.fail('it was done before'))
    assert example.main(arguments) == 0
    assert capsys.readouterr().out == table
