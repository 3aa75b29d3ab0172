"""The benchmarks run and print what they promise; what they measure is no matter of tests."""

import json
import math
import os
import types
from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import (
    against,
    cold_prunes,
    compile,
    compiled,
    elsewhere,
    report,
    timing,
)
from benchmarks.step import KEEP_MEMORY
from benchmarks.timing import IN_PLACE, Ratio, Timing, interleaved, interval, ratio
from jaxpruner.structure import costs

SLOW = (
    'global',
    'step',
    'memory',
    'sharded',
    'compile',
    'oneshot',
    'structure',
    'sparse_training',
    'sparse_unstructured',
    'storage',
    'sparse_execution',
)  # what compiles many programs, or another process
EACH_SUBJECT = [
    pytest.param(subject, marks=pytest.mark.slow) if subject in SLOW else subject
    for subject in benchmarks.SUBJECTS
]
PROGRAM = """
%body.1 (state: (f32[8], s32[])) -> (f32[8], s32[]) {
  %sum.1 = f32[8]{0} all-reduce(%part), to_apply=%add
  %both = (u32[], u32[4,2]{1,0}) all-reduce(%a, %b), to_apply=%add
}

%empty.2 (state: s32[]) -> s32[] {
  ROOT %next = s32[] add(%state, %one)
}

ENTRY %main.3 (x: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %begun = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), dimensions={0}
  %gathered = f32[16]{0} all-gather-done(%begun)
  %counted = s32[] while(%zero), condition=%test, body=%empty.2
  %looped = (f32[8], s32[]) while(%gathered), condition=%test, body=%body.1
  ROOT %out = f32[8]{0} conditional(%looped), true_computation=%then, false_computation=%otherwise
}
"""


@pytest.mark.parametrize('subject', EACH_SUBJECT)
@pytest.mark.filterwarnings('ignore')
def test_each_subject_runs(subject, capfd, monkeypatch):
    # A process of its own compiles everything anew: the one that needs eight devices is enough.
    for name, value in {**KEEP_MEMORY, IN_PLACE: '1', 'KERAS_BACKEND': 'jax'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cold_prunes, 'ALGORITHMS', ('wanda',))
    monkeypatch.setattr(cold_prunes, 'MOST_PROCESSES', 1)
    # No time is read here, so that short ones will do; a search for a latency still takes the median of 30 rounds.
    monkeypatch.setattr(timing, 'LONG_ENOUGH', 1e-3)
    monkeypatch.setattr(costs, 'LONG_ENOUGH', 4e-3)
    assert benchmarks.main([subject, '--size', 'small', '--rounds', '2', '--json']) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed['subject'] == subject
    assert 'jax' in printed['machine']
    assert printed['rows']
    for row in printed['rows']:
        assert row.pop('name')
        values = [value for value in row.values() if value is not None]
        assert values
        for value in values:
            check_number(value)


def check_number(value):
    if isinstance(value, dict):
        assert value.keys() == {'median', 'low', 'high'}
        assert value['low'] <= value['median'] <= value['high']
        value = value['median']
    assert isinstance(value, int | float)
    assert math.isfinite(value)


def test_a_table_is_printed(capsys):
    assert benchmarks.main(['block', '--size', 'small', '--rounds', '2']) == 0
    table = capsys.readouterr().out
    assert 'passes over the memory' in table
    assert 'blocks of 4 x 4, [64, 64]' in table


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--rounds', '1'], '--rounds must be at least 2, got 1'),
        (['sorting'], "'sorting'"),
        (['nm', '--against', 'tests'], 'no src/jaxpruner in --against tests'),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    try:
        status = benchmarks.main(arguments)
    except SystemExit as exit_of_tyro:
        status = exit_of_tyro.code
    printed = capsys.readouterr()  # releases of tyro differ in where they print
    assert (status, message in printed.out + printed.err) == (2, True)


def test_ratios_are_taken_round_by_round_and_their_median_has_an_interval():
    assert ratio(Timing([2.0, 40.0, 6.0]), Timing([1.0, 10.0, 2.0])) == Ratio(3.0, 2.0, 4.0)
    of, to = Timing([1.0 + i / 100 for i in range(101)]), Timing([1.0] * 101)
    quartiles, found = ratio(of, to), interval(of, to)
    assert found.median == quartiles.median == 1.5
    assert quartiles.low < found.low < 1.5 < found.high < quartiles.high
    # Where processes differ it is as wide as they.
    of, to = Timing([1.0] * 20 + [1.2] * 20 + [1.4] * 20), Timing([1.0] * 60)
    assert interval(of, to, parts=3) == Ratio(1.2, 1.0, 1.4)


def test_numbers_with_two_libraries_are_compared(monkeypatch, tmp_path):
    """Here processes print 3 with this library, and 2 with another."""
    order, here = [], against.HERE

    def printed(name, size, rounds, as_json, environment):
        tree = Path(environment['PYTHONPATH'].split(os.pathsep)[0]).parent
        order.append(tree)
        number = 3 if tree == here else 2
        row = {'name': 'row', 'number': number, 'ratio': {'median': number, 'low': 0, 'high': 9}}
        rows = [{**row, 'text': 'text', 'nothing': None, 'zero': 0}]
        return json.dumps({'library': str(tree / against.PACKAGE), 'rows': rows})

    monkeypatch.setattr(against, 'printed_elsewhere', printed)
    (tmp_path / against.PACKAGE).mkdir(parents=True)
    columns, other = ('number', 'ratio', 'text', 'nothing', 'zero', 'missing'), tmp_path.resolve()
    (row,) = against.compare('nm', columns, 'small', 4, other)
    half_more = Ratio(1.5, 1.5, 1.5)
    assert row == report.Row('row', (half_more, half_more, None, None, None, None))
    assert order == [here, other, other, here, here, other]


def test_a_subject_elsewhere_says_which_library_it_measured():
    source = str(against.HERE / against.PACKAGE.parent)
    printed = elsewhere.printed_elsewhere('packing', 'small', 2, True, {'PYTHONPATH': source})
    assert json.loads(printed)['library'] == str(against.HERE / against.PACKAGE)


def test_short_calls_are_repeated_until_the_clock_does_not_matter(monkeypatch):
    clock, calls = types.SimpleNamespace(perf_counter=lambda: 1e-2 * len(calls)), []
    monkeypatch.setattr(timing, 'time', clock)
    times = interleaved({'short': lambda: calls.append(1)}, 5)
    assert times['short'].rounds == pytest.approx([1e-2] * 5)
    assert len(calls) == 1 + (1 + 2) + 5 * 2  # to compile, to find how often, and to time


def test_a_stopped_benchmark_prints_what_is_measured(monkeypatch, capsys):
    laps = dict.fromkeys((*compile.STEP_PARTS, 'cold', 'warm'), (1.0, 2.0))
    measured = [types.SimpleNamespace(stdout=json.dumps(laps))]
    answers = [*measured, *measured, KeyboardInterrupt]
    monkeypatch.setattr(compile.subprocess, 'run', Mock(side_effect=answers))
    with pytest.raises(KeyboardInterrupt):
        benchmarks.main(['compile', '--size', 'small', '--json'])
    rows = json.loads(capsys.readouterr().out)['rows']
    assert [row['seconds'] for row in rows] == [3.0, 1.0, 1.0]


def test_values_in_a_table():
    values = Ratio(1.0144, 0.99, 1.05), Ratio(3.0, 2.0, 4.0), 12.345, 250.4, -0.5, 1024, 'a', None
    texts = '1.014 (0.990–1.050)', '3.00 (2.00–4.00)', '12.3', '250', '-0.500', '1024', 'a', ''
    assert tuple(map(report.as_text, values)) == texts


def test_collectives_are_read_off_a_program():
    assert compiled.collectives(PROGRAM) == compiled.Collectives(largest=16, in_a_turn=2)
    assert compiled.collectives('ENTRY %main () -> f32[] {\n}\n') == compiled.Collectives(0, 0)
    assert compiled.loops_and_branches(PROGRAM) == 3


def test_temporary_bytes_are_those_of_what_is_neither_argument_nor_result():
    x = jnp.ones((64, 64))
    assert compiled.temporary_bytes(jnp.add, x, x) == 0
    assert compiled.temporary_bytes(lambda x: jnp.sort(x.ravel())[0], x) >= x.nbytes
