"""The benchmarks run and print what they promise; what they measure is no matter of tests."""

import json
import subprocess
import sys
import typing

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.timing import Timing, ratio

SUBJECTS = typing.get_args(benchmarks.Subject)


@pytest.mark.parametrize('subject', SUBJECTS)
def test_each_subject_runs(subject, capsys):
    assert benchmarks.main([subject, '--size', 'small', '--rounds', '2', '--json']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed['subject'] == subject
    assert 'jax' in printed['machine']
    assert all(value != '' or 'sort' in key for row in printed['rows'] for key, value in row.items())


def test_as_a_command():
    command = [sys.executable, '-m', 'benchmarks', 'activations', '--size', 'small', '--rounds', '2']
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'times a ReLU' in table
    assert 'density 0.9' in table


def test_too_few_rounds_are_refused(capsys):
    assert benchmarks.main(['--rounds', '1']) == 2
    assert '--rounds must be at least 2, got 1' in capsys.readouterr().err


def test_ratios_are_taken_round_by_round():
    slow, fast = Timing([2.0, 40.0, 6.0]), Timing([1.0, 10.0, 2.0])
    assert ratio(slow, fast).median == 3.0
    assert str(ratio(slow, fast)) == '3.00 (2.00–4.00)'
