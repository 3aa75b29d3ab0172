"""The strategies example: its model, what its strategies do to it, what it refuses, and an interrupted run."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mnist_strategies
from helpers import seed_documents
from jaxpruner import activations

pytestmark = pytest.mark.slow

SHORT = ['--epochs', '3', '--batch-size', '600']  # two steps an epoch


def run(capsys, *arguments):
    assert mnist_strategies.main([*SHORT, *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


@seed_documents.needs_documents
def test_the_model_is_the_documents():
    text = seed_documents.find('A complete example', 'prune_act_unstruct').partition(
        'At model definition'
    )[2]
    code = text[text.index('class CNN') :].partition('```')[0]
    names = {'nn': nn, **vars(activations)}
    exec(code, names)
    images = jax.random.uniform(jax.random.key(0), (4, 8, 8, 1))
    models = names['CNN'](), mnist_strategies.CNN(density=0.9, sparsity_pattern=(2, 4))
    variables, ours = (model.init(jax.random.key(1), images) for model in models)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, variables)
    # At first relu makes half of the activations zero, so that a density of 0.9 would change nothing.
    variables['params']['Conv_0']['bias'] += 1
    expected, found = (model.apply(variables, images) for model in models)
    np.testing.assert_array_equal(found, expected)


def densities(printed):
    return [float(density) for density in re.findall(r'\w+_\d ([\d.]+)', printed[-2])]


def test_a_strategy_has_a_density_for_each_layer(tmp_path, capsys):
    found = densities(run(capsys, '--strategy', 'example-4', '--out', tmp_path))
    np.testing.assert_allclose(found, [1, 1, 0.9, 0.8], atol=2e-3)


@pytest.mark.filterwarnings('ignore:.*Dense_1-kernel.*does not divide:UserWarning')
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path, capsys, monkeypatch):
    whole = run(capsys, '--strategy', 'example-3', '--out', tmp_path / 'whole')
    # Of the 10 outputs of Dense_1 the last two are a group of their own.
    np.testing.assert_allclose(densities(whole), [0.25, 0.25, 0.25, 0.3], atol=2e-3)
    train_epoch, epochs = mnist_strategies.train_epoch, []

    def stop(*arguments):
        epochs.append(1)
        if len(epochs) == 3:
            raise KeyboardInterrupt
        return train_epoch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(mnist_strategies, 'train_epoch', stop)
        with pytest.raises(KeyboardInterrupt):
            run(capsys, '--strategy', 'example-3', '--out', tmp_path / 'cut')
    first = capsys.readouterr().out.splitlines()
    again = run(capsys, '--strategy', 'example-3', '--out', tmp_path / 'cut')
    assert again[0].startswith('Continuing: 2 of 3 epochs')
    assert first + again[1:-1] == whole[:-1]  # the last has the time
