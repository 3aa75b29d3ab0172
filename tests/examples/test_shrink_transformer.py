"""The example that halves a transformer, with a tiny model: its table, what it keeps, and what it refuses."""

import json

import pytest

import shrink_transformer as example

ARGUMENTS = ['--small', '--steps', '3', '--tune-steps', '2', '--seeds', '0', '--no-progress']


@pytest.mark.slow
def test_half_the_flops_stay_and_a_second_run_trains_nothing(tmp_path, capsys, monkeypatch):
    arguments = [*ARGUMENTS, '--out', str(tmp_path)]
    assert example.main(arguments) == 0
    table = capsys.readouterr().out
    assert [line.split('|')[1].strip() for line in table.splitlines()[2:]] == list(
        example.ROWS.values()
    )
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert 0.3 < result['flops'] <= 0.5
    assert result['loss']['cut'] != result['loss']['tuned']

    monkeypatch.setattr(example.Experiment, 'run', lambda *_: pytest.fail('it was done before'))
    assert example.main(arguments) == 0
    assert capsys.readouterr().out == table
