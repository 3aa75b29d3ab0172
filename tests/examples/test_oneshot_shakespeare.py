"""The one-shot example with a tiny model: its results, what it does after an interruption, what it refuses."""

import functools
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

import oneshot_shakespeare as example
import oneshot_shakespeare_pruning
import oneshot_shakespeare_training
from jaxpruner.baselines.checkpointing import Checkpoints
from oneshot_shakespeare_differences import over_seeds, over_sequences
from oneshot_shakespeare_pruning import DENSE, OUTPUT_ERROR, read_cells, results_of, variants
from oneshot_shakespeare_training import SMALL, Text, Training, windows

EXAMPLE = pathlib.Path(example.__file__)
ROOT = EXAMPLE.parents[1]
ARGUMENTS = ['--small', '--seeds', '3']


def interrupt_at(number, function):
    """Ctrl-C at a call."""
    calls = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


def never(*_):
    raise AssertionError('it was done before')


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """The folder of a run that was interrupted while it pruned, and then went on."""
    out = tmp_path_factory.mktemp('finished')
    arguments = [*ARGUMENTS, '--out', str(out)]
    with pytest.MonkeyPatch.context() as patch:
        stopped = interrupt_at(4, oneshot_shakespeare_pruning.write_losses)
        patch.setattr(oneshot_shakespeare_pruning, 'write_losses', stopped)
        assert example.main(arguments) == example.INTERRUPTED
    before = {cell.name: cell for cell in read_cells(out / 'unstructured')}
    assert len(before) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, '_one_step', never)
        assert example.main(arguments) == 0
    after = {cell.name: cell for cell in read_cells(out / 'unstructured')}
    assert before.items() <= after.items()
    return out


def cells_of(out):
    return {
        (way.folder, cell.algorithm, cell.sparsity): cell
        for way in variants(SMALL)
        for cell in read_cells(out / way.folder)
    }


def test_every_way_has_a_result(finished):
    cells = cells_of(finished)
    assert cells.keys() == {(way.folder, *rest) for way, *rest in results_of(SMALL)}
    for (_, algorithm, sparsity), cell in cells.items():
        assert cell.value < np.log(200)
        assert cell.reached == pytest.approx(sparsity, abs=0.02)
        if algorithm != DENSE:
            parts = 'attention/query attention/key attention/value attention/out up down'.split()
            assert cell.layers.keys() == {f'block_0/{part}/kernel' for part in parts}
        error = cell.metrics[OUTPUT_ERROR]
        assert error == 0 if algorithm == DENSE else 0 < error < 1


def test_table_differences_and_plot_are_written_and_printed(finished, capsys, monkeypatch):
    monkeypatch.setattr(example, 'run', never)
    assert example.main([*ARGUMENTS, '--out', str(finished), '--table']) == 0
    printed = capsys.readouterr().out
    for name in ('table.md', 'errors.md', 'differences.md'):
        assert (finished / name).read_text() in printed
    assert '| 2:4 (pydoc): loss ↓' in printed
    assert printed.count('-inf to inf') == 41  # of one seed
    assert (finished / 'sparsity.png').read_bytes().startswith(b'\x89PNG')


TEXT = Text(np.arange(5000) % 7, np.arange(300) % 7, 7)


def test_an_interrupted_training_ends_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(oneshot_shakespeare_training, 'SAVE_EVERY', 5)
    training = Training(SMALL, TEXT)
    checkpoints = {name: Checkpoints(tmp_path / name) for name in ('whole', 'parts')}
    whole = training.train(0, checkpoints['whole'])
    with monkeypatch.context() as patch:
        patch.setattr(training, '_step', interrupt_at(13, training._step))
        with pytest.raises(KeyboardInterrupt):
            training.train(0, checkpoints['parts'])
    steps = []
    parts = training.train(0, checkpoints['parts'], steps.append)
    assert steps == list(range(11, 21))
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
    assert whole.seconds > 0
    training.train(0, checkpoints['parts'], never)
    losses = training.evaluate(whole.params, windows(TEXT.validation, 16))
    assert losses.shape == (18,)
    assert losses.mean() < np.log(7)


def test_intervals():
    values = np.array([[1.0, 3.0], [2.0, 4.0], [3.0, 5.0]])
    low, high = over_seeds(values)
    half = 4.302653 / np.sqrt(3)  # Student's quantile of two degrees of freedom
    assert (low, high) == pytest.approx((3 - half, 3 + half))
    assert over_seeds(values[:1]) == (-np.inf, np.inf)
    assert over_sequences(values) == (2.0, 4.0)


def test_the_command_of_the_document_is_understood(monkeypatch):
    called = []
    monkeypatch.setattr(example, 'run', called.append)
    monkeypatch.setattr(example, 'report', called.append)
    page = (ROOT / 'docs/oneshot.md').read_text()
    for line in re.findall(r'^python examples/oneshot_shakespeare.py (.*)$', page, re.MULTILINE):
        assert example.main(shlex.split(line)) == 0
    assert called
