"""The strategies example: its model, what its strategies do to it, what it refuses, and an interrupted run."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mnist_strategies
import mnist_strategies_run
import mnist_strategies_training
from helpers import compiling, seed_documents
from jaxpruner import activations
from mnist_strategies_data import Dataset

pytestmark = pytest.mark.slow

EXAMPLE = pathlib.Path(mnist_strategies.__file__)
PARTIAL_GROUPS = pytest.mark.filterwarnings('ignore:.*Dense_1-kernel.*does not divide:UserWarning')
SHORT = ['--epochs', '3', '--batch-size', '600']  # two steps an epoch
KERNELS = {
    'Conv_0': (3, 3, 1, 32),
    'Conv_1': (3, 3, 32, 64),
    'Dense_0': (256, 256),
    'Dense_1': (256, 10),
}


def saved(out):
    """The arrays of the last state in a folder, by name."""
    with ocp.CheckpointManager(out.absolute() / mnist_strategies_run.STATES_NAME) as manager:
        tree = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def printed_densities(text):
    """The densities of the layers in the last line."""
    return {
        layer: float(density)
        for layer, density in re.findall(r'(\w+_\d) ([\d.]+)', text.splitlines()[-1])
    }


def start(**settings):
    return mnist_strategies.create_start(mnist_strategies.Settings(**settings), (8, 8, 1))


@pytest.fixture(autouse=True, scope='module')
def compiled_once():
    """Runs with the same model and optimizer share their compiled functions."""
    create = functools.cache(mnist_strategies.create_start)
    shared = 'activation_density', 'activation_pattern', 'learning_rate', 'seed'

    def create_start(settings, image_shape):
        same = mnist_strategies.Settings(**{name: getattr(settings, name) for name in shared})
        return create(same, tuple(image_shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist_strategies, 'create_start', create_start)
        yield


def noise(number=8):
    images = np.random.default_rng(0).random((2, number, 8, 8, 1), np.float32)
    labels = np.arange(2 * number, dtype=np.int32).reshape(2, number) % 10
    return Dataset('noise', images[0], labels[0], images[1], labels[1])


# The model.


def test_the_kernels_of_the_model():
    params = start().state.params
    assert {layer: params[layer]['kernel'].shape for layer in params} == KERNELS


@seed_documents.needs_documents
@pytest.mark.parametrize('size', [8, 28])
def test_the_model_is_the_documents(size):
    text = seed_documents.find('A complete example', 'prune_act_unstruct').partition(
        'At model definition'
    )[2]
    code = text[text.index('class CNN') :].partition('```')[0]
    names = {
        'nn': nn,
        'prune_act_unstruct': activations.prune_act_unstruct,
        'prune_act_struct': activations.prune_act_struct,
    }
    exec(code, names)
    images = jax.random.uniform(jax.random.key(0), (4, size, size, 1))
    models = names['CNN'](), mnist_strategies_training.CNN(density=0.9, sparsity_pattern=(2, 4))
    variables, ours = (model.init(jax.random.key(1), images) for model in models)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, variables)
    # At first relu makes half of the activations zero, so that a density of 0.9 would change nothing.
    variables['params']['Conv_0']['bias'] += 1
    expected, found = (model.apply(variables, images) for model in models)
    np.testing.assert_array_equal(found, expected)
    for other in ({'density': 0.5}, {'sparsity_pattern': (1, 4)}):
        assert not np.array_equal(
            mnist_strategies_training.CNN(**other).apply(variables, images), expected
        )


# The training.


def test_an_epoch_sees_every_full_batch_and_reports_each_step():
    steps = []
    state, loss, accuracy = mnist_strategies_training.train_epoch(
        start().state, noise(), 3, jax.random.key(0), on_step=lambda: steps.append(None)
    )
    assert (int(state.step), len(steps)) == (2, 2)
    assert loss > 0
    assert 0 <= accuracy <= 1


@pytest.mark.parametrize('every_step', [True, False])
def test_between_two_epochs_pruned_weights_move_unless_masked_every_step(every_step):
    first = start()
    strategy = {1: {'method': 'unstr_unified_local', 'prune_rate_pattern': 0.5}}
    _, masks = mnist_strategies.pruning(first.state, 1, None, strategy)
    state, _ = mnist_strategies.pruning_apply(first.state, masks)
    state, *_ = mnist_strategies_training.train_epoch(
        state, noise(), 4, jax.random.key(0), masks if every_step else None
    )
    pruned = state.params['Dense_0']['kernel'][masks['Dense_0']['kernel'] == 0]
    assert bool((pruned == 0).all()) is every_step


def test_evaluation_in_batches_is_that_of_the_whole():
    number = mnist_strategies_training.EVALUATION_BATCH + 7
    state, data = start().state, noise(number)
    _, loss, accuracy = mnist_strategies_training.apply_model(state, data.x_test, data.y_test)
    found = mnist_strategies_training.evaluate(state, data.x_test, data.y_test)
    np.testing.assert_allclose(found, (loss, accuracy), rtol=1e-5)


# The strategies. Of the 10 outputs of Dense_1 the last two are a group of their own, which keeps min(N, 2).


@pytest.mark.parametrize(
    ('strategy', 'renewed', 'densities'),
    [
        ('half', [1], [0.5, 0.5, 0.5, 0.5]),
        ('dense', [], [1, 1, 1, 1]),
        ('gradual', [1], [0.1, 0.1, 0.1, 0.1]),
        pytest.param('example-2', [1], [0.5, 0.5, 0.5, 0.6], marks=PARTIAL_GROUPS),
        pytest.param('example-3', [1, 2], [0.25, 0.25, 0.25, 0.3], marks=PARTIAL_GROUPS),
        ('example-4', [1], [1, 1, 0.9, 0.8]),
    ],
)
def test_strategies_reach_their_densities(tmp_path, capsys, strategy, renewed, densities):
    assert mnist_strategies.main([*SHORT, '--strategy', strategy, '--out', str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ''
    lines = printed.out.splitlines()
    assert len(lines) == 4
    assert [
        epoch for epoch, line in enumerate(lines[:3], 1) if line.endswith('new masks')
    ] == renewed
    found = printed_densities(printed.out)
    assert list(found) == list(KERNELS)
    np.testing.assert_allclose(list(found.values()), densities, atol=2e-3)


def test_a_global_density_is_that_of_all_layers_together(tmp_path, capsys):
    assert mnist_strategies.main([*SHORT, '--strategy', 'example-1', '--out', str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert 'density 0.900 (' in text
    assert len(set(printed_densities(text).values())) > 1


@pytest.mark.parametrize('epochs', [2, 3, 10, 30])
def test_built_in_strategies_prune_within_the_epochs(epochs):
    for name in mnist_strategies.built_in_strategies(epochs):
        mnist_strategies.Settings(strategy=name, epochs=epochs).read_strategy()


def test_of_30_epochs_the_examples_prune_at_the_documents():
    found = {
        name: mnist_strategies.read_strategy(name, 30).epochs
        for name in mnist_strategies.built_in_strategies(30)
    }
    examples = {
        f'example-{number}': epochs
        for number, epochs in enumerate([(1,), (10,), (10, 20), (10,)], 1)
    }
    assert found | examples == found


@pytest.mark.parametrize('suffix', ['toml', 'json'])
def test_a_strategy_from_a_file(tmp_path, capsys, suffix):
    texts = {
        'toml': '[2]\nmethod = "unstr_local"\nprune_rate_pattern = { Dense_0-kernel = 0.25 }\n',
        'json': '{"2": {"method": "unstr_local", "prune_rate_pattern": {"Dense_0-kernel": 0.25}}}',
    }
    path = tmp_path / f'mine.{suffix}'
    path.write_text(texts[suffix])
    assert (
        mnist_strategies.main([*SHORT, '--strategy', str(path), '--out', str(tmp_path / 'out')])
        == 0
    )
    densities = printed_densities(capsys.readouterr().out)
    np.testing.assert_allclose(list(densities.values()), [1, 1, 0.25, 1], atol=1e-3)


# What is refused.


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--strategy', 'hlf'], ['--strategy', "'hlf'", 'half']),
        (['--strategy', 'none.toml'], ['--strategy', "'none.toml'", 'no file']),
        (['--strategy', __file__], ['--strategy', '.toml or .json']),
        (['--strategy', 'example-3', '--epochs', '1'], ['example-3', 'epoch 2', '--epochs']),
        (['--epochs', '0'], ['--epochs', 'at least 1', '0']),
        (['--batch-size', '-1'], ['--batch-size', 'at least 1', '-1']),
        (['--batch-size', '5000'], ['--batch-size', 'at most 1347', '5000']),
        (['--learning-rate', 'nan'], ['--learning-rate', 'positive', 'nan']),
        (['--seed', '-1'], ['--seed', '-1']),
        (['--activation-density', '0'], ['--activation-density', '(0, 1]', '0']),
        (['--activation-pattern', '4:2'], ['--activation-pattern', 'n=4']),
        (['--activation-pattern', 'half'], ['--activation-pattern', "'half'"]),
        (['--data-dir', 'nowhere'], ['nowhere', 'mnist.npz']),
        (['--out', __file__], ['--out', __file__, 'folder']),
    ],
    ids=lambda value: '='.join(value[-2:])[-40:] if value[0].startswith('--') else '',
)
def test_bad_settings_are_refused_before_any_work(tmp_path, capsys, arguments, words):
    assert (
        mnist_strategies.main(['--out', str(tmp_path / 'out'), *arguments])
        == mnist_strategies.REFUSED
    )
    refused_by_name(capsys, words)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('[1]\nmethod = "unstr_global"\nprune_rate_pattern = 2.0', ['[1]', '2.0']),
        ('[1]\nmethod = "str_unified_local"\nprune_rate_pattern = 0.5', ['[1]', '(N, M)', '0.5']),
        ('[one]\nmethod = "unstr_global"\nprune_rate_pattern = 0.5', ["'one'", 'whole number']),
        ('[1]\nmethod = "unstr_local"\nprune_rate_pattern = { Dense_2 = 0.5 }', ['[1]', 'Dense_2']),
        ('[1', ['TOML']),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, capsys, text, words):
    path = tmp_path / 'mine.toml'
    path.write_text(text)
    arguments = ['--strategy', str(path), '--out', str(tmp_path / 'out')]
    assert mnist_strategies.main(arguments) == mnist_strategies.REFUSED
    refused_by_name(capsys, ['--strategy', *words])
    assert not (tmp_path / 'out').exists()


def refused_by_name(capsys, words):
    printed = capsys.readouterr()
    assert printed.out == ''
    assert printed.err.count('\n') == 1
    for word in words:
        assert word in printed.err


# A run that ends early.


# Masks are made after epoch 2, of two layers alone.
RATES = {'Dense_0-kernel': 0.9, 'Conv_1-kernel': 0.3}


@pytest.fixture(scope='module')
def long_run(tmp_path_factory):
    """Arguments of a run, what it prints where nothing stops it, and the arrays that it leaves."""
    folder = tmp_path_factory.mktemp('whole')
    path = folder / 'mine.json'
    path.write_text(json.dumps({2: {'method': 'unstr_local', 'prune_rate_pattern': RATES}}))
    arguments = ['--epochs', '5', '--batch-size', '600', '--strategy', str(path), '--seed', '3']
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert mnist_strategies.main([*arguments, '--out', str(folder / 'out')]) == 0
    return arguments, printed.getvalue().splitlines(), saved(folder / 'out')


@pytest.mark.parametrize('done', [0, 1, 3], ids=['at once', 'before the masks', 'after the masks'])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    tmp_path, capsys, monkeypatch, long_run, done
):
    arguments, whole, uncut = long_run
    train_epoch, calls = mnist_strategies.train_epoch, []

    def stop(*args):
        if len(calls) == done:
            raise KeyboardInterrupt
        calls.append(args)
        return train_epoch(*args)

    command = [*arguments, '--out', str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(mnist_strategies, 'train_epoch', stop)
        assert mnist_strategies.main(command) == mnist_strategies.INTERRUPTED
    first = capsys.readouterr().out.splitlines()
    assert len(first) == done + 1
    assert 'The same command continues' in first[-1]

    assert mnist_strategies.main(command) == 0
    second = capsys.readouterr().out.splitlines()
    if done:
        assert second.pop(0).startswith(f'Continuing: {done} of 5 epochs')
    assert first[:-1] + second[:-1] == whole[:-1]  # the last has the time

    cut = saved(tmp_path)
    assert cut.keys() == uncut.keys()
    assert any('masks' in name for name in cut)
    for name, array in cut.items():
        np.testing.assert_array_equal(array, uncut[name], err_msg=name)


def test_a_finished_run_is_not_trained_again(tmp_path, capsys, monkeypatch):
    arguments = [*SHORT, '--out', str(tmp_path)]
    assert mnist_strategies.main(arguments) == 0
    first = capsys.readouterr().out.splitlines()
    with monkeypatch.context() as patch:
        patch.setattr(mnist_strategies, 'train_epoch', None)
        assert mnist_strategies.main(arguments) == 0
    second = capsys.readouterr().out.splitlines()
    assert second[0].startswith('Continuing: 3 of 3 epochs')
    assert (
        second[1].partition(' min')[0].rpartition(',')[0]
        == first[-1].partition(' min')[0].rpartition(',')[0]
    )


def test_another_commands_folder_is_refused_unless_fresh(tmp_path, capsys):
    out = ['--out', str(tmp_path / 'out')]
    assert mnist_strategies.main([*SHORT, *out]) == 0
    before, _ = saved(tmp_path / 'out'), capsys.readouterr()
    other = [*SHORT, *out, '--seed', '1', '--strategy', 'dense']
    assert mnist_strategies.main(other) == mnist_strategies.REFUSED
    refused_by_name(capsys, [str(tmp_path / 'out'), '--strategy, --seed', '--fresh'])
    np.testing.assert_equal(saved(tmp_path / 'out'), before)

    assert mnist_strategies.main([*other, '--fresh']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4  # none says that it continues
    assert mnist_strategies.main(other) == 0


def test_fresh_leaves_other_files_alone(tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    assert mnist_strategies.main([*SHORT, '--out', str(tmp_path), '--fresh']) == 0
    assert (tmp_path / 'notes.txt').read_text() == 'mine'


@pytest.mark.parametrize('content', ['{"epochs": 3', '[1, 2]', 'null', ''])
def test_damaged_settings_are_refused_by_name(tmp_path, capsys, content):
    (tmp_path / mnist_strategies_run.SETTINGS_NAME).write_text(content)
    assert mnist_strategies.main([*SHORT, '--out', str(tmp_path)]) == mnist_strategies.REFUSED
    refused_by_name(capsys, [str(tmp_path), mnist_strategies_run.SETTINGS_NAME, '--fresh'])


def test_a_damaged_state_is_refused_by_name(tmp_path, capsys):
    arguments = [*SHORT, '--out', str(tmp_path)]
    assert mnist_strategies.main(arguments) == 0
    capsys.readouterr()
    for path in (tmp_path / mnist_strategies_run.STATES_NAME / '3').rglob('*'):
        if path.is_file():
            os.truncate(path, 10)
    assert mnist_strategies.main(arguments) == mnist_strategies.REFUSED
    assert '--fresh' in capsys.readouterr().err
    assert mnist_strategies.main([*arguments, '--fresh']) == 0


def test_the_script_runs_on_its_own():
    """From anywhere, without the tests' search path for modules."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), '--help'], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '--strategy' in done.stdout


# What it promises.


@pytest.mark.slow
def test_accuracy_on_digits_with_half_of_everything(tmp_path):
    assert printed_accuracy('--out', tmp_path) > 95  # 97.3 % were measured


@pytest.mark.slow
@pytest.mark.skipif(
    'JAXPRUNER_SHARED' not in os.environ,
    reason='JAXPRUNER_SHARED does not name a folder with MNIST',
)
def test_accuracy_on_a_part_of_mnist_with_half_of_everything(tmp_path):
    path = pathlib.Path(os.environ['JAXPRUNER_SHARED']) / 'data' / 'mnist.npz'
    if not path.exists():
        pytest.skip(f'{path} does not exist')
    with np.load(path) as archive:
        lengths = {'x_train': 6000, 'y_train': 6000, 'x_test': 2000, 'y_test': 2000}
        np.savez(
            tmp_path / 'mnist.npz',
            **{name: archive[name][:length] for name, length in lengths.items()},
        )
    arguments = '--data-dir', tmp_path, '--epochs', 4, '--out', tmp_path / 'out'
    assert printed_accuracy(*arguments) > 94  # 96.1 to 96.4 % were measured with three seeds


def printed_accuracy(*arguments):
    """In a process of its own, since it takes long with programs that are not optimized."""
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    environment = compiling.environment_of_users()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(re.search(r'test accuracy ([\d.]+) %', done.stdout.splitlines()[-1])[1])
