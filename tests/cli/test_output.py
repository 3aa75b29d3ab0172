"""Output is as wide as it is read: COLUMNS, a terminal, or 80."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

import jaxpruner
from helpers.made_up_cells import make_cell
from jaxpruner.checkpoints import write_safetensors
from jaxpruner.cli import output
from jaxpruner.cli.main import main
from jaxpruner.report import write_cell

NAMES = 'no_prune random magnitude saliency global_magnitude magnitude_ste static_sparse set rigl'.split()


@pytest.fixture
def results(tmp_path):
    for name in NAMES:
        for seed in range(3):
            for sparsity in [0.0] if name == 'no_prune' else [0.8, 0.95]:
                write_cell(tmp_path / 'results', make_cell(name, sparsity, seed, 0.9 + seed / 100))
    return str(tmp_path / 'results')


def widest(text):
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize(
    ('columns', 'expected'), [(None, 80), ('60', 60), ('200', 200), ('0', 80), ('wide', 80)]
)
def test_tables_are_as_wide_as_columns_says(columns, expected, results, capsys, monkeypatch):
    monkeypatch.delenv('COLUMNS', raising=False)
    if columns is not None:
        monkeypatch.setenv('COLUMNS', columns)
    assert output.width() == expected
    assert main(['table', results]) == 0
    shown = capsys.readouterr().out
    assert widest(shown) <= expected
    assert all(name in shown for name in NAMES)
    assert '…' not in shown


def test_a_terminal_says_how_wide_it_is():
    command = [sys.executable, '-c', 'from jaxpruner.cli import output; print(output.width())']
    environment = {name: value for name, value in os.environ.items() if name != 'COLUMNS'}
    environment['PYTHONPATH'] = str(Path(jaxpruner.__file__).parents[1])
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 123, 0, 0))
    subprocess.run(command, stdout=slave, env=environment, check=True)
    assert os.read(master, 100).decode().strip() == '123'
    os.close(master)
    os.close(slave)


NAME = 'model.layers.31.self_attention.query_projection.weight'


def test_inspect_keeps_words_whole_at_80(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv('COLUMNS', raising=False)
    path = tmp_path / 'a.safetensors'
    sparse = np.tile(np.array([0, 1, 1, 0], np.float32), (16, 4))
    write_safetensors(
        path, {NAME: sparse, 'bias': np.ones(4, np.float32), 'bad\x1b[31m': np.ones(4, np.float32)}
    )
    assert main(['inspect', str(path)]) == 0
    shown = capsys.readouterr().out
    assert widest(shown) <= 80
    pieces = [line.split('  ')[0] for line in shown.splitlines()]
    assert all(piece in ''.join(pieces) for piece in NAME.split('.'))
    assert not any(line.startswith(('ht', 'weigh ', 'rojection')) for line in shown.splitlines())
    assert '1:2 along axis 1' in shown
    assert '\x1b' not in shown


def test_equal_layers_are_one_row_of_each_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    path = tmp_path / 'a.safetensors'
    weights = {f'model.layers.{i}.self_attn.q_proj.weight': np.ones((8, 8)) for i in range(12)}
    for i, weight in enumerate(weights.values()):
        weight[:, : 2 if i else 4] = 0
    write_safetensors(path, weights)
    assert main(['inspect', str(path)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert '25.00%-50.00%' in shown
    assert shown.count('{0-11}') == 1
    assert shown.count('{1-11}') == 2  # layer 0 has more dead channels, and another smallest format
    assert '12 leaves' in shown
    assert main(['inspect', str(path), '--json']) == 0
    assert len(json.loads(capsys.readouterr().out)['leaves']) == 12


def test_packed_bytes_add_up(tmp_path, capsys):
    path = tmp_path / 'a.safetensors'
    write_safetensors(
        path, {'dense': np.ones((8, 8), np.float32), 'sparse': np.eye(8, dtype=np.float32)}
    )
    assert main(['inspect', str(path), '--json']) == 0
    content = json.loads(capsys.readouterr().out)
    sizes = [leaf['packed_bytes'] for leaf in content['leaves']]
    assert sizes == [256, 40]
    assert content['total']['packed_bytes'] == sum(sizes)
    assert main(['inspect', str(path)]) == 0
    last_words = [
        line.split()[-2] for line in capsys.readouterr().out.splitlines() if line.endswith(' B')
    ]
    assert last_words == ['256', '40', '296']


def test_a_flax_kernel_is_told_where_its_inputs_are(tmp_path, capsys):
    path = tmp_path / 'a.safetensors'
    weights = np.arange(64.0).reshape(8, 8)
    write_safetensors(path, {'dense/kernel': weights, 'dense.weight': weights})
    for kind, told in (('2:4', True), ('nm_2,4,-2', False)):
        assert (
            main(
                ['prune', str(path), '--types', kind, '--out', str(tmp_path / 'out'), '--overwrite']
            )
            == 0
        )
        printed = ' '.join(capsys.readouterr().out.split())
        assert ('nm_2,4,-2 lies along' in printed) == told


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['compare', 'vit', '--sparsities', '80'], '--sparsities must lie in'),
        (['compare', 'vit', '--seeds', '-1'], '--seeds must be a whole number'),
        (['run', 'vit', '--sparsity', '1.5'], '--sparsity must lie in'),
        (['run', 'vit', '--algorithm', 'sett'], "--algorithm 'sett' is unknown"),
        (['run', 'vit', '--set', 'steps'], "--set: 'steps' is no key=value"),
        (['prune', 'FILE', '--types', '2-4'], "--types: '2-4': unknown sparsity type"),
        (['prune', 'FILE', '--types', 'w=4:2'], "--types: 'w=4:2': N:M sparsity keeps n of m"),
        (['prune', 'FILE', '--types', '2:4'], "leave them dense: --skip 'w'"),
        (
            ['prune', 'FILE', '--skip', '*', '--sparsity', '0.5'],
            'or its full name in --only',
        ),
        (['prune', 'FILE'], '--sparsity: w needs one, since its type is unstructured'),
    ],
)
def test_messages_speak_of_options(arguments, words, tmp_path, capsys):
    path = tmp_path / 'a.safetensors'
    write_safetensors(path, {'w': np.ones((6, 6))})
    command = [str(path) if argument == 'FILE' else argument for argument in arguments]
    command += ['--out', str(tmp_path / 'out')] if 'FILE' in arguments else ['--print-recipe']
    assert main(command) == 2
    said = capsys.readouterr().err
    assert words in said
    assert 'sparsity_type=' not in said
