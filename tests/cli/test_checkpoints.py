"""`inspect` and `prune` as they are called."""

import json
import os
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from jaxpruner.checkpoints import open_checkpoint, write_safetensors
from jaxpruner.cli.interrupts import heard_interrupts
from jaxpruner.cli.main import main

RNG = np.random.default_rng(0)


@pytest.fixture
def dense(tmp_path):
    tensors = {
        'mlp.up': RNG.standard_normal((16, 8)).astype(ml_dtypes.bfloat16),
        'mlp.norm[0]': np.ones(8, np.float32),
        'head': RNG.standard_normal((8, 8)).astype(np.float16),
    }
    path = tmp_path / 'dense.safetensors'
    write_safetensors(path, tensors, {'format': 'pt'})
    return path


def test_prune_then_inspect(dense, tmp_path, capsys):
    out = tmp_path / 'out.safetensors'
    arguments = [
        '--types',
        '*up=2:4',
        '--sparsity',
        '0.75',
        '--masks-out',
        str(tmp_path / 'masks.safetensors'),
    ]
    assert main(['prune', str(dense), *arguments, '--out', str(out)]) == 0
    said = '2 of 3 tensors pruned, 112 of their 192 weights removed (58.33%; 56.00% of all 200)'
    printed, errors = capsys.readouterr()
    assert (printed.splitlines()[0], errors) == (f'{out}: {said}', '')
    rows = [' '.join(line.split()) for line in printed.splitlines()[3:]]
    assert rows == [
        '1 128 pruned: 2:4 along axis -1 mlp.up',
        '1 64 pruned: unstructured head',
        '1 8 left: one dimension or none mlp.norm[0]',
    ]
    assert open_checkpoint(tmp_path / 'masks.safetensors').read('head').sum() == 16

    assert main(['inspect', str(out)]) == 0
    shown = capsys.readouterr().out
    for words in (
        'mlp.norm[0]',
        '16×8',
        'bfloat16',
        '2:4 along axis 1',
        '75.00%',
        '56.00%',
        '3 leaves',
    ):
        assert words in shown

    assert main(['inspect', str(out), '--json']) == 0
    content = json.loads(capsys.readouterr().out)
    assert content['metadata'] == {'format': 'pt'}
    assert content['total'] == {
        'leaves': 3,
        'weights': 200,
        'sparsity': 0.56,
        'bytes': 416,
        'packed_bytes': 216,
    }
    assert content['leaves'][0] == {
        'name': 'mlp.up',
        'shape': [16, 8],
        'dtype': 'bfloat16',
        'sparsity': 0.5,
        'n_of_m': {'n': 2, 'm': 4, 'axis': 1},
        'block': None,
        'dead_channels': [0, 0],
        'dead_indices': [[], []],
        'bytes': 256,
        'packed_bytes': 144,
        'formats': {'dense': 256, 'n_by_m': 144, 'blocks': None, 'csr': None, 'bitmask': 144},
        'smallest': 'dense',
    }


def test_a_type_alone_is_for_all_and_needs_no_sparsity(dense, tmp_path):
    assert (
        main(
            [
                'prune',
                str(dense),
                '--types',
                '1:4',
                '--skip',
                'head',
                '--out',
                str(tmp_path / 'out'),
            ]
        )
        == 0
    )
    out = open_checkpoint(tmp_path / 'out')
    assert np.count_nonzero(out.read('mlp.up').astype(float)) == 32
    assert np.count_nonzero(out.read('head')) == 64


@pytest.mark.parametrize(
    ('arguments', 'pruned', 'remedy'),
    [
        (['--types', '2:4'], ['mlp.weight'], "--types '*=2:4' prunes them, too"),
        (['--sparsity', '0.5'], ['mlp.weight'], "--types '*=unstructured' prunes them, too"),
        (['--types', '*=2:4'], ['lm_head.weight', 'mlp.weight', 'model.embed_tokens.weight'], ''),
        (['--types', 'mlp*=2:4', '*=dense'], ['mlp.weight'], ''),
    ],
)
def test_embeddings_and_heads_stay_dense_unless_a_glob_names_them(
    arguments, pruned, remedy, tmp_path, capsys
):
    names = ('lm_head.weight', 'mlp.weight', 'model.embed_tokens.weight')
    tensors = {name: RNG.standard_normal((8, 8), np.float32) for name in names}
    write_safetensors(tmp_path / 'dense', tensors)
    arguments = [str(tmp_path / 'dense'), *arguments, '--out', str(tmp_path / 'out')]
    assert main(['prune', *arguments]) == 0
    out = open_checkpoint(tmp_path / 'out')
    assert [name for name in names if (out.read(name) == 0).mean() == 0.5] == pruned
    words = ' '.join(capsys.readouterr().out.split())
    assert ('model.embed_tokens.weight, lm_head.weight' in words) == bool(remedy)
    assert remedy in words


def test_random_scores_and_erk(dense, tmp_path):
    outs = []
    for seed in ('1', '2', '1'):
        arguments = [
            '--scores',
            'random',
            '--seed',
            seed,
            '--distribution',
            'erk',
            '--sparsity',
            '0.5',
            '--overwrite',
        ]
        assert main(['prune', str(dense), *arguments, '--out', str(tmp_path / 'out')]) == 0
        outs.append((tmp_path / 'out').read_bytes())
    assert outs[0] == outs[2] != outs[1]


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (
            ['--sparsity', '80'],
            '--sparsity must lie in [0, 1] (the share of weights removed), got 80.0; 80.0 per cent',
        ),
        (
            ['--sparsity', '0.5', '--types', '=2:4'],
            "--types: '=2:4' has no name before =; write NAME=TYPE",
        ),
        (['--sparsity', '0.5', '--types', 'head=4:2'], 'n must not exceed m'),
        (
            ['--sparsity', '0.5', '--only', 'hed'],
            "--only: 'hed' matches no parameter; the nearest are 'head'",
        ),
        (['--types', 'head=2:4'], '--sparsity: mlp.up needs one, since its type is unstructured'),
        (['--sparsity', '0.5', '--seed', '-1'], '--seed must not be negative, got -1'),
        (['--sparsity', '0.5', '--masks-out', 'OUT'], '--masks-out and --out are the same file'),
    ],
)
def test_errors_name_the_remedy_and_leave_nothing(dense, tmp_path, capsys, arguments, words):
    out = str(tmp_path / 'out')
    assert (
        main(['prune', str(dense), *(out if a == 'OUT' else a for a in arguments), '--out', out])
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith('jaxpruner: ')
    assert words in said
    assert [file.name for file in tmp_path.iterdir()] == ['dense.safetensors']


def test_a_truncated_file_is_refused_by_name(dense, capsys):
    dense.write_bytes(dense.read_bytes()[:-1])
    assert main(['inspect', str(dense)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f'jaxpruner: {dense} is no safetensors file, or only a part of one')
    assert said.count('\n') == 1


def test_an_existing_file_is_kept(dense, capsys):
    assert main(['prune', str(dense), '--sparsity', '0.5', '--out', str(dense)]) == 2
    assert (
        capsys.readouterr().err
        == f'jaxpruner: {dense} exists; choose another name, or say --overwrite\n'
    )


# A shell's background job ignores SIGINT, and its children would, too.
RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxpruner.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [0, 0.1, 0.3])
def test_ctrl_c_leaves_nothing_behind(tmp_path, seconds):
    dense = tmp_path / 'dense.safetensors'
    write_safetensors(
        dense, {str(i): RNG.standard_normal((512, 8192), np.float32) for i in range(8)}
    )
    command = [sys.executable, '-c', RUN, 'prune', dense, '--sparsity', '0.5', '--scores', 'random']
    # Stopped while it looks for TPUs, JAX leaves a timer behind that warns after a minute.
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    command += ['--out', tmp_path / 'out']
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        end = time.monotonic() + 120
        while (
            not list(tmp_path.glob('.out.*.jaxpruner-tmp'))
            and process.poll() is None
            and time.monotonic() < end
        ):
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == 'jaxpruner: stopped\n'
    assert process.returncode == 130
    assert [file.name for file in tmp_path.iterdir()] == ['dense.safetensors']


def test_an_interrupt_that_python_drops_is_repeated():
    class Interrupted:
        def __del__(self):
            raise KeyboardInterrupt

    def work():
        Interrupted()
        for _ in range(1000):
            time.sleep(0.01)

    # What a shell starts with & begins without it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), heard_interrupts():
            work()
    finally:
        signal.signal(signal.SIGINT, before)
