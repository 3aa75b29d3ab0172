"""Plans in files: what is read back is what was saved, and belongs to the model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.structure import channel_groups, load_plan, save_plan

SHAPES = {'up': (2, 4), 'down': (4, 1)}
KEEP = {'up[1]': [0, 3]}


def graph_of(shapes=SHAPES):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((5, 2), jnp.float32)
    return channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, x)


@pytest.fixture
def path(tmp_path):
    save_plan(graph_of(), KEEP, tmp_path / 'plan.json')
    return tmp_path / 'plan.json'


def test_a_plan_is_read_back(path):
    keep = load_plan(graph_of(), path)
    assert list(keep) == ['up[1]']
    np.testing.assert_array_equal(keep['up[1]'], [0, 3])
    plan = json.loads(path.read_text())
    assert plan['parameters']['down'] == {'before': [4, 1], 'after': [2, 1]}
    assert [entry.name for entry in path.parent.iterdir()] == ['plan.json']


def test_lists_are_read_back(tmp_path):
    params = {'up': jnp.ones((3, 2, 6)), 'down': jnp.ones((3, 6, 2))}

    def layer(x, p):
        return jnp.tanh(x @ p['up']) @ p['down'], None

    graph = channel_groups(lambda p, x: jax.lax.scan(layer, x, p)[0], params, jnp.ones((5, 2)))
    keep = {'up[2]': [[0, 1], [2, 4], [3, 5]]}
    save_plan(graph, keep, tmp_path / 'plan.json')
    np.testing.assert_array_equal(load_plan(graph, tmp_path / 'plan.json')['up[2]'], keep['up[2]'])
    small = graph.shrink(params, keep, allow_inexact=True)
    jaxpruner.save_small_model(graph, small, keep, tmp_path / 'small.safetensors')
    loaded = jaxpruner.load_small_model(graph, tmp_path / 'small.safetensors')
    jax.tree.map(np.testing.assert_array_equal, loaded.params, small)
    np.testing.assert_array_equal(loaded.keep['up[2]'], keep['up[2]'])


OTHER_MODELS = {
    'shape': ({'up': (2, 6), 'down': (6, 1)}, r'down is \[4, 1\] there, and \[6, 1\] here'),
    'missing': ({**SHAPES, 'bias': (4,)}, r'bias is absent there, and \[4\] here'),
}


@pytest.mark.parametrize(('shapes', 'message'), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_plans_of_other_models_are_refused(path, shapes, message):
    with pytest.raises(ValueError, match=message):
        load_plan(graph_of(shapes), path)


SPOILT = {
    'version': (lambda plan: plan.update(version=2), 'version 2, and 1 is read'),
    'format': (lambda plan: plan.update(format='x'), "no plan of channels .its format is 'x' of"),
    'index': (lambda plan: plan['groups']['up[1]'].update(keep=[0, 4]), r"keep\['up\[1\]'\] has 4"),
    'parameter': (
        lambda plan: plan['parameters'].update(x={'before': [1], 'after': [1]}),
        r'x is \[1\] there, and absent',
    ),
}


@pytest.mark.parametrize(('spoil', 'message'), SPOILT.values(), ids=SPOILT)
def test_files_that_are_no_plan_are_refused(path, spoil, message):
    plan = json.loads(path.read_text())
    spoil(plan)
    path.write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=message):
        load_plan(graph_of(), path)


def test_what_is_no_json_is_refused(path):
    path.write_text('{')
    with pytest.raises(ValueError, match=r'plan\.json is no plan of channels'):
        load_plan(graph_of(), path)
    with pytest.raises(OSError, match=r'missing\.json'):
        load_plan(graph_of(), path.with_name('missing.json'))
