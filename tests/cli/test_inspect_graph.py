"""`inspect --graph`: which channels of a model are zero in a checkpoint."""

import json
import sys

import numpy as np
import pytest

from jaxpruner.checkpoints import write_safetensors
from jaxpruner.cli.main import main

_MODULE = """
import jax
import jax.numpy as jnp

import jaxpruner


def graph(hidden=12):
    def apply(params, x):
        layer = params['layers'][0]
        return jax.nn.relu(x @ layer['up'] + layer['bias']) @ params['down']

    shapes = {'layers': [{'up': (3, hidden), 'bias': (hidden,)}], 'down': (hidden, 2)}
    zeros = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda node: isinstance(node, tuple))
    return jaxpruner.channel_groups(apply, zeros, jnp.zeros((5, 3)))


made = graph(hidden=6)
other = {'no': 'graph'}
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / 'own_graph.py').write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    yield
    sys.modules.pop('own_graph', None)


def tensors():
    """Unit 1 has no row, units 4 to 6 have neither a column nor a bias, unit 9 has a bias alone."""
    rng = np.random.default_rng(0)
    shapes = {'layers.0.up': (3, 12), 'layers.0.bias': (12,), 'down': (12, 2)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays['down'][1] = 0
    arrays['layers.0.up'][:, [4, 5, 6, 9]] = 0
    arrays['layers.0.bias'][4:7] = 0
    return arrays


@pytest.mark.parametrize('prefix', ['', 'params.'])
def test_channels_that_can_go_are_named(tmp_path, capsys, prefix):
    path = tmp_path / 'model.safetensors'
    write_safetensors(path, {prefix + name: array for name, array in tensors().items()})
    assert main(['inspect', str(path), '--graph', 'own_graph:graph']) == 0
    printed = capsys.readouterr().out
    assert '1 of 12 dead along axis 0: 1\n' in printed
    assert '4 of 12 dead along axis 1: 4-6, 9\n' in printed
    assert printed.splitlines()[-1].split() == ['layers/0/up[1]', '12', '4', '1,', '4-6']

    assert main(['inspect', str(path), '--graph', 'own_graph:graph', '--json']) == 0
    content = json.loads(capsys.readouterr().out)
    assert content['zero_channels'] == {'layers/0/up[1]': [1, 4, 5, 6]}
    dead = {leaf['name'].removeprefix(prefix): leaf['dead_indices'] for leaf in content['leaves']}
    assert dead == {'layers.0.up': [[], [4, 5, 6, 9]], 'layers.0.bias': [], 'down': [[1], []]}


def test_it_is_said_that_none_can_go(tmp_path, capsys):
    path = tmp_path / 'model.safetensors'
    write_safetensors(path, {name: np.ones_like(array) for name, array in tensors().items()})
    assert main(['inspect', str(path), '--graph', 'own_graph:graph']) == 0
    assert capsys.readouterr().out.endswith('\nno channels of the 1 groups of the model are zero\n')


REFUSED = {
    'a file': ('own_graph.py', "graph: 'own_graph.py' names nothing in a module; write mine:graph"),
    'no such module': ('nowhere:graph', "graph: 'nowhere' cannot be imported"),
    'no such name': ('own_graph:grahp', 'graph: the module own_graph has no grahp'),
    'another object': ('own_graph:other', 'graph: own_graph:other is no ChannelGraph, but dict'),
    'other shapes': ('own_graph:made', 'has shape (12, 2), but (6, 2) in the model'),
}


@pytest.mark.parametrize(('name', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_is_no_graph_of_the_checkpoint_is_refused(tmp_path, capsys, name, message):
    path = tmp_path / 'model.safetensors'
    write_safetensors(path, tensors())
    assert main(['inspect', str(path), '--graph', name]) == 2
    assert message in capsys.readouterr().err


def test_a_leaf_that_is_missing_is_named(tmp_path, capsys):
    path = tmp_path / 'model.safetensors'
    arrays = tensors()
    arrays['dwon'] = arrays.pop('down')
    write_safetensors(path, arrays)
    assert main(['inspect', str(path), '--graph', 'own_graph:graph']) == 2
    assert "the checkpoint lacks 'down'" in capsys.readouterr().err
