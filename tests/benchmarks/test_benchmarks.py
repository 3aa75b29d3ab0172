"""The benchmarks run and print what they promise; what they measure is no matter of tests."""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpruner
from benchmarks import __main__ as benchmarks
from benchmarks import (
    against,
    cold,
    cold_prunes,
    compiled,
    elsewhere,
    many_leaves,
    models,
    report,
    selection,
    step,
    timing,
    training,
)
from benchmarks import compile as first_steps
from benchmarks.timing import Ratio, Timing, interleaved, interval, ratio
from jaxpruner.structure import latency

SLOW = (
    'global',
    'many_leaves',
    'step',
    'memory',
    'sharded',
    'compile',
    'sweep',
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
# Columns that not every row fills.
MAY_BE_EMPTY = {
    'limit',
    'top_k takes times as long',
    'sorting takes times as long',
    'milliseconds inside a program',
    'argsort takes times as long there',
    'seconds',
    'difference of the metric',
    'in test examples',
    'milliseconds',
    'limit in milliseconds',
    'MiB',
    'limit of that',
    'init',
    'lower',
    'compile',
    'limit in seconds',
    'the original',
    'times as fast',
    'at least',
    'as predicted',
    'share of memory',
    'share of parameters',
    'share of FLOPs',
    'weights and moments, share of bytes',
    'with positions',
    'share of weights',
    'memory to weights',
    'share of the dense file',
    'over the least format',
    'zip takes times as many bytes',
    'zstd takes times as many bytes',
    'saving takes times as long as writing dense',
    'loading takes times as long as writing dense',
    'peak MiB',
    'by default',
}

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
def test_each_subject_runs(subject, capsys, monkeypatch):
    monkeypatch.setattr(cold_prunes, 'MOST_PROCESSES', 1)  # of each algorithm
    # No time is read here, so that short ones will do; a search for a latency still takes the median of 30 rounds.
    monkeypatch.setattr(timing, 'LONG_ENOUGH', 1e-3)
    monkeypatch.setattr(latency, 'LONG_ENOUGH', 4e-3)
    assert benchmarks.main([subject, '--size', 'small', '--rounds', '2', '--json']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed['subject'] == subject
    assert 'jax' in printed['machine']
    assert printed['rows']
    for row in printed['rows']:
        assert row.pop('name')
        empty = {column for column, value in row.items() if value is None}
        assert empty <= MAY_BE_EMPTY
        for column in row.keys() - empty:
            check_number(row[column])


def check_number(value):
    if isinstance(value, dict):
        assert value.keys() == {'median', 'low', 'high'}
        assert value['low'] <= value['median'] <= value['high']
        value = value['median']
    assert isinstance(value, int | float)
    assert math.isfinite(value)


def test_as_a_command():
    command = [sys.executable, '-m', 'benchmarks', 'channel', '--size', 'small', '--rounds', '2']
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'passes over the memory' in table
    assert 'channels along axis -1, [64, 64]' in table


def test_several_subjects_are_printed_line_by_line(capsys):
    assert (
        benchmarks.main(['channel', 'packing', '--size', 'small', '--rounds', '2', '--json']) == 0
    )
    assert [json.loads(line)['subject'] for line in capsys.readouterr().out.splitlines()] == [
        'channel',
        'packing',
    ]


def test_without_subjects_all_are_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(importlib, 'import_module', lambda name: measured.append(name) or Nothing)
    monkeypatch.setattr(report, 'show', lambda *_: None)
    assert benchmarks.main([]) == 0
    assert len(set(measured)) == len(benchmarks.SUBJECTS)


class Nothing:
    ROUNDS, COLUMNS = 2, ()

    @staticmethod
    def run(size, rounds):
        return []


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--rounds', '1'], '--rounds must be at least 2, got 1'),
        (['--rounds', '0'], '--rounds must be at least 2, got 0'),
        (['sorting'], "'sorting'"),
        (['nm', '--size', 'huge'], "'huge'"),
        (['nm', '--against', 'tests'], 'no src/jaxpruner in --against tests'),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    try:
        status = benchmarks.main(arguments)
    except SystemExit as exit_of_tyro:
        status = exit_of_tyro.code
    assert status == 2
    assert message in ''.join(
        capsys.readouterr()
    )  # older versions of tyro print errors with the rest


def test_a_reference_with_another_mask_is_refused(monkeypatch):
    monkeypatch.setattr(selection, 'by_argsort', lambda x, kept: jnp.zeros_like(x))
    with pytest.raises(
        AssertionError, match=r'the mask by argsort is another, for float32\[1000\]'
    ):
        selection.run('small', 2)


def test_ratios_are_taken_round_by_round():
    slow, fast = Timing([2.0, 40.0, 6.0]), Timing([1.0, 10.0, 2.0])
    assert ratio(slow, fast) == Ratio(3.0, 2.0, 4.0)
    assert slow.milliseconds == 6000


def test_the_interval_of_a_median_is_narrower_than_the_quartiles():
    of, to = Timing([1.0 + i / 100 for i in range(101)]), Timing([1.0] * 101)
    quartiles, found = ratio(of, to), interval(of, to)
    assert found.median == quartiles.median == 1.5
    assert quartiles.low < found.low < 1.5 < found.high < quartiles.high
    assert interval(of, to) == found  # no chance in it
    assert interval(to, to) == Ratio(1.0, 1.0, 1.0)


def test_where_processes_differ_the_interval_is_as_wide():
    of, to = Timing([1.0] * 20 + [1.2] * 20 + [1.4] * 20), Timing([1.0] * 60)
    assert interval(of, to, parts=3) == Ratio(1.2, 1.0, 1.4)
    assert interval(of, to).high == 1.2


@pytest.mark.slow
def test_steps_are_timed_in_several_processes(monkeypatch):
    monkeypatch.setattr(step, 'FEWEST_IN_A_PROCESS', 1)
    calls, run = [], subprocess.run
    monkeypatch.setattr(
        step.subprocess,
        'run',
        lambda command, **named: calls.append(command) or run(command, **named),
    )
    rows = step.run('small', 2)
    assert [command[-1] for command in calls] == ['1', '1']
    assert len(rows) == len(models.TRAINED['small']) * len(training.METHODS)


def test_models_are_as_large_as_is_said():
    def leaves(model):
        return jax.tree.leaves(jax.eval_shape(model.init))

    on_cpu, on_gpu = (leaves(models.TRANSFORMERS[size]) for size in ('cpu', 'gpu'))
    assert round(sum(leaf.size for leaf in on_cpu) / 1e6, 1) == 5.3
    assert len([leaf for leaf in on_cpu if leaf.ndim > 1]) >= 30
    assert round(sum(leaf.size for leaf in on_gpu) / 1e6) == 136
    assert {leaf.dtype for leaf in on_gpu} == {jnp.dtype(jnp.bfloat16)}
    assert len(leaves(cold.MANY_LEAVES)) == 214


def test_many_leaves_are_as_many_and_as_large_as_is_said():
    sizes = {}
    for name, shapes in many_leaves.SIZES['gpu'].items():
        sizes[name] = len(shapes), round(sum(map(math.prod, shapes)) / 1e6)
    assert sizes == {
        '96 leaves of 0.2 million': (96, 19),
        '200 leaves of 10,000': (200, 2),
        '32 leaves of 4 million': (32, 128),
        '80 leaves of 13 million': (80, 1007),
    }
    assert len({*many_leaves.LEAVES['96 leaves of 0.2 million']}) == 4


def test_masks_of_another_number_of_weights_are_refused(monkeypatch):
    def masks(scores, pruner):
        return [jnp.ones_like(score) for score in scores]

    monkeypatch.setattr(many_leaves, '_masks', masks)
    with pytest.raises(AssertionError, match=r'leaf by leaf: the masks keep 3072 weights .* 307'):
        many_leaves.run('small', 2)


@pytest.mark.slow
@pytest.mark.parametrize('method', cold.METHODS)
def test_first_steps_compile(method):
    taken = cold.FirstStep(cold.SMALL, cold.METHODS[method]).measure()
    assert taken.keys() == {*first_steps.STEP_PARTS}
    assert all(lap.seconds > 0 for lap in taken.values())


def test_first_calls_are_measured():
    taken = cold.Call(cold.SMALL, cold.sparsified).measure()
    assert all(taken[part].seconds > 0 for part in ('cold', 'warm'))


def test_what_is_claimed_of_first_steps_is_measured():
    names = {row for row in cold.CASES['cpu'] if row in first_steps.LIMITS}
    for name, case in cold.CASES['cpu'].items():
        if isinstance(case, cold.Call):
            names.add(f'{name}: cold')
    assert names == {*first_steps.LIMITS, *first_steps.LIMITS_IN_SECONDS}
    assert first_steps.THE_ORIGINAL.keys() <= cold.CASES['cpu'].keys()


def test_rows_of_cold_processes(monkeypatch):
    taken = {
        'dense': ([1.0, 2.0, 3.0], 2),
        'magnitude': ([2.0, 4.0, 6.0], 3),
        'call': ([8.0, 1.0], 1),
    }

    def measured_in_a_process(command, **_):
        kind = next(kind for kind in taken if kind in command[-1])
        seconds, cores = taken[kind]
        parts = first_steps.STEP_PARTS if len(seconds) == 3 else ('cold', 'warm')
        laps = {part: (each, cores * each) for part, each in zip(parts, seconds, strict=True)}
        return types.SimpleNamespace(stdout=json.dumps(laps))

    step, call = cold.FirstStep(cold.SMALL, cold.METHODS['dense']), cold.Call(cold.SMALL, print)
    names = '24 layers, 96 kernels: dense', '24 layers, 96 kernels: magnitude', 'call'
    cases = dict(zip(names, (step, step, call), strict=True))
    monkeypatch.setitem(cold.CASES, 'small', cases)
    monkeypatch.setattr(first_steps.subprocess, 'run', measured_in_a_process)
    dense, magnitude, first, second = first_steps.run('small', 2)
    same = Ratio(1.0, 1.0, 1.0)
    twice, three_times = Ratio(2.0, 2.0, 2.0), Ratio(3.0, 3.0, 3.0)
    eightfold = Ratio(8.0, 8.0, 8.0)
    original = pytest.approx(4.18 / 2.62)
    assert dense.values == (1.0, 2.0, 3.0, 6.0, None, same, None, 1.0, 12.0, same)
    assert magnitude.values == (
        *(2.0, 4.0, 6.0, 12.0, None, twice, 1.7, original, 36.0, three_times),
    )
    nothing = (None,) * 3
    assert first == report.Row(
        'call: cold', (*nothing, 8.0, None, eightfold, None, None, 8.0, eightfold)
    )
    assert second == report.Row('call: warm', (*nothing, 1.0, None, same, None, None, 1.0, same))


@pytest.fixture
def two_libraries(monkeypatch, tmp_path):
    """Processes that print 3 with this library and 2 with that of another tree, and the trees in their order."""
    order = []

    def printed(name, size, rounds, as_json, environment):
        tree = Path(environment['PYTHONPATH'].split(os.pathsep)[0]).parent
        order.append(tree)
        here = tree == against.HERE
        median = {'median': 3 if here else 2, 'low': 0, 'high': 9}
        row = {'name': 'row', 'number': 3.0 if here else 2.0, 'ratio': median}
        rows = [{**row, 'text': 'text', 'nothing': None, 'zero': 0}]
        return json.dumps({'library': str(tree / against.PACKAGE), 'rows': rows})

    monkeypatch.setattr(against, 'printed_elsewhere', printed)
    (tmp_path / against.PACKAGE).mkdir(parents=True)
    return types.SimpleNamespace(order=order, other=tmp_path.resolve())


def test_numbers_with_two_libraries_are_compared(two_libraries):
    columns = 'number', 'ratio', 'text', 'nothing', 'zero', 'missing'
    (row,) = against.compare('nm', columns, 'small', 4, two_libraries.other)
    half_more = Ratio(1.5, 1.5, 1.5)
    assert row == report.Row('row', (half_more, half_more, None, None, None, None))
    here, other = against.HERE, two_libraries.other
    assert two_libraries.order == [here, other, other, here, here, other]


def test_the_other_library_is_the_one_that_is_measured(monkeypatch, two_libraries):
    printed = json.dumps({'library': '/elsewhere/jaxpruner', 'rows': []})
    monkeypatch.setattr(against, 'printed_elsewhere', lambda *_: printed)
    with pytest.raises(RuntimeError, match='/elsewhere/jaxpruner was measured rather than'):
        against.compare('nm', (), 'small', 2, two_libraries.other)


def test_a_comparison_is_printed(two_libraries, capsys):
    other = str(two_libraries.other)
    assert benchmarks.main(['nm', '--against', other, '--json']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed['subject'] == f'nm, times that of {other}'
    assert [row['name'] for row in printed['rows']] == ['row']


def test_a_subject_elsewhere_says_which_library_it_measured():
    source = str(against.HERE / against.PACKAGE.parent)
    printed = elsewhere.printed_elsewhere('channel', 'small', 2, True, {'PYTHONPATH': source})
    assert json.loads(printed)['library'] == str(against.HERE / against.PACKAGE)


def test_a_transformer_learns_and_does_not_look_ahead():
    model = models.TRANSFORMERS['small']
    params, batch = jax.jit(model.init)(), model.batch()
    training_run = training.Training(model, training.METHODS['dense'])
    for _ in range(20):
        trained, _ = training_run()
    loss, losses = jax.jit(model.loss), jax.jit(model.losses)
    assert loss(trained, batch) < 0.99 * loss(params, batch)
    # The first three tokens are told as well as if there were no others.
    three = models.Batch(batch.inputs[:, :3], batch.labels[:, :3])
    shorter = {**params, 'positions': params['positions'][:3]}
    assert jnp.allclose(losses(params, batch)[:, :3], losses(shorter, three), rtol=1e-4)


def test_scanned_blocks_do_what_the_same_blocks_do():
    model = dataclasses.replace(models.TRANSFORMERS['small'], blocks=2)
    scanned = dataclasses.replace(model, scanned=True)
    params, tokens = jax.jit(model.init)(), model.batch().inputs
    stacked = jax.jit(scanned.init)()
    assert stacked['blocks']['up']['kernel'].shape == (2, 16, 64)
    expected = jax.jit(model.logits)(params, tokens)
    assert jnp.allclose(jax.jit(scanned.logits)(stacked, tokens), expected, atol=1e-5)


def test_timed_steps_are_sparse():
    model = models.TRAINED['small']['MLP']
    timed = training.Training(model, training.METHODS['magnitude, in-graph'])
    timed()
    params, state = timed()
    assert int(state.count) == 2
    assert float(jaxpruner.sparsity_metrics(state)['_mask_sparsity']) == pytest.approx(
        0.9, abs=0.02
    )
    assert jnp.mean(params['layer_0']['kernel'] == 0) == pytest.approx(0.9, abs=0.02)


class Clock:
    """Time that passes in calls alone."""

    def __init__(self):
        self.now = 0.0
        self.calls = 0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return 2 * self.now

    def call_of(self, seconds):
        def call():
            self.now += seconds
            self.calls += 1

        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, 'time', clock)
    return clock


def test_short_calls_are_repeated_until_the_clock_does_not_matter(clock):
    short = timing.LONG_ENOUGH / 3
    times = interleaved({'short': clock.call_of(short)}, 5)
    assert times['short'].rounds == pytest.approx([short] * 5)
    assert clock.calls == 1 + (1 + 2 + 4) + 5 * 4  # to compile, to find how often, and to time


def test_long_calls_and_cold_ones_are_not_repeated(clock):
    assert interleaved({'long': clock.call_of(1.0)}, 5)['long'].rounds == [1.0] * 5
    assert clock.calls == 1 + 1 + 5
    interleaved({'short': clock.call_of(1e-9)}, 5, warm=False)
    assert clock.calls == 7 + 5


def test_a_program_calls_as_often_as_it_says():
    calls = []

    def function(x):
        jax.debug.callback(lambda: calls.append(1))
        return x > 1

    assert timing.in_program(3, function, jnp.ones(2))().tolist() == [False, False]
    jax.effects_barrier()
    assert len(calls) == 3


def test_laps_follow_one_another(clock):
    watch = timing.Stopwatch()
    clock.call_of(3.0)()
    assert watch.lap() == timing.Lap(3.0, 6.0)
    clock.call_of(1.0)()
    assert watch.lap() == timing.Lap(1.0, 2.0)


def test_slow_calls_get_fewer_rounds(clock):
    calls = {'fast': clock.call_of(0.5), 'slow': clock.call_of(1.5)}
    assert [len(interleaved(calls, 10, seconds)['slow'].rounds) for seconds in (1, 9, 100)] == [
        3,
        5,
        10,
    ]


@pytest.mark.parametrize(
    ('value', 'text', 'in_json'),
    [
        (
            Ratio(1.0144, 0.99, 1.05),
            '1.014 (0.990–1.050)',
            {'median': 1.0144, 'low': 0.99, 'high': 1.05},
        ),
        (Ratio(3.0, 2.0, 4.0), '3.00 (2.00–4.00)', {'median': 3.0, 'low': 2.0, 'high': 4.0}),
        (12.345, '12.3', 12.345),
        (250.4, '250', 250.4),
        (-0.5, '-0.500', -0.5),
        (1024, '1024', 1024),
        ('text', 'text', 'text'),
        (None, '', None),
    ],
)
def test_a_value_in_a_table_and_in_json(value, text, in_json, capsys):
    assert report.as_text(value) == text
    report.show('subject', ('column',), [report.Row('row', (value,))], as_json=True)
    assert json.loads(capsys.readouterr().out)['rows'] == [{'name': 'row', 'column': in_json}]


def test_collectives_are_read_off_a_program():
    assert compiled.collectives(PROGRAM) == compiled.Collectives(largest=16, in_a_turn=2)
    assert compiled.collectives('ENTRY %main () -> f32[] {\n}\n') == compiled.Collectives(0, 0)


def test_loops_and_branches_are_counted():
    assert compiled.loops_and_branches(PROGRAM) == 3
    looped = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x))
    assert compiled.loops_and_branches(looped.lower(1).compile().as_text()) == 1


def test_watched_programs_say_what_memory_they_took_at_most():
    before, module = jax.jit, types.SimpleNamespace(compiled=jax.jit(jnp.square))
    with compiled.watched((module, 'compiled')) as watch:
        x = jnp.ones(2**20)
        live = compiled.live_bytes()
        assert watch.bytes == 0
        module.compiled(x)
        assert watch.bytes == live + x.nbytes
        jax.jit(lambda x: jnp.stack([x, x]))(x)
        assert watch.bytes == live + 2 * x.nbytes
        x = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        jax.jit(jax.jit(jnp.sum))(x)
        assert watch.bytes == live + 2 * x.nbytes
    assert jax.jit is before


def test_temporary_bytes_are_those_of_what_is_neither_argument_nor_result():
    x = jnp.ones((64, 64))
    assert compiled.temporary_bytes(jnp.add, x, x) == 0
    assert compiled.temporary_bytes(lambda x: jnp.sort(x.ravel())[0], x) >= x.nbytes
