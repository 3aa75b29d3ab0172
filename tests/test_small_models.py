"""Smaller models in files: read back, and refused where they are not what their plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import checkpoints

X = jax.ShapeDtypeStruct((5, 3), jnp.float32)
SHAPES = {'up': (3, 6), 'bias': (6,), 'down': (6, 2)}
KEEP = {'up[1]': np.array([0, 2, 5])}


def apply(params, x):
    return jax.nn.relu(x @ params['up'] + params['bias']) @ params['down']


def normalized(params, state, x):
    hidden = (x @ params['up'] - state['mean']) * params['bias']
    return hidden @ params['down'], {'mean': 0.9 * state['mean'] + hidden.mean(0)}


def abstract(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def random(shapes, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def graph_of(shapes=SHAPES):
    return jaxpruner.channel_groups(apply, abstract(shapes), X)


@pytest.fixture
def path(tmp_path):
    graph = graph_of()
    path = tmp_path / 'small.safetensors'
    jaxpruner.save_small_model(graph, graph.shrink(random(SHAPES), KEEP), KEEP, path)
    return path


def test_it_is_read_back_with_shapes_alone(path):
    graph, x = graph_of(), random({'x': (5, 3)}, seed=1)['x']
    small = jaxpruner.load_small_model(graph, path)
    expected = apply(graph.zeroed(random(SHAPES), KEEP), x)
    found = graph.small_apply(small.keep)(small.params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_state_is_saved_beside_the_parameters(tmp_path):
    state = random({'mean': (6,)}, seed=2)
    graph = jaxpruner.channel_groups(normalized, abstract(SHAPES), X, state=state)
    params, small_state = graph.shrink(random(SHAPES), KEEP), graph.shrink(state, KEEP)
    path = tmp_path / 'small.safetensors'
    for saved in (small_state, None):
        jaxpruner.save_small_model(graph, params, KEEP, path, state=saved)
        small = jaxpruner.load_small_model(graph, path)
        jax.tree.map(np.testing.assert_array_equal, small.params, params)
        jax.tree.map(np.testing.assert_array_equal, small.state, saved)


def test_lists_of_layers_are_read_back(tmp_path):
    params = {'up': jnp.ones((3, 2, 6)), 'down': jnp.ones((3, 6, 2))}

    def layer(x, p):
        return jnp.tanh(x @ p['up']) @ p['down'], None

    graph = jaxpruner.channel_groups(
        lambda p, x: jax.lax.scan(layer, x, p)[0], params, jnp.ones((5, 2))
    )
    keep = {'up[2]': [[0, 1], [2, 4], [3, 5]]}
    small = graph.shrink(params, keep, allow_inexact=True)
    jaxpruner.save_small_model(graph, small, keep, tmp_path / 'small.safetensors')
    loaded = jaxpruner.load_small_model(graph, tmp_path / 'small.safetensors')
    jax.tree.map(np.testing.assert_array_equal, loaded.params, small)
    np.testing.assert_array_equal(loaded.keep['up[2]'], keep['up[2]'])


def test_what_is_no_small_model_is_not_saved(tmp_path):
    graph, params = graph_of(), random(SHAPES)
    path = tmp_path / 'small.safetensors'
    with pytest.raises(ValueError, match=r'bias has shape \(6,\).*\(3,\)'):
        jaxpruner.save_small_model(graph, params, KEEP, path)
    with pytest.raises(ValueError, match=r'parameters .*another structure'):
        jaxpruner.save_small_model(graph, {'up': params['up']}, KEEP, path)
    with pytest.raises(ValueError, match='state has another structure'):
        jaxpruner.save_small_model(graph, graph.shrink(params, KEEP), KEEP, path, state=params)
    assert not path.exists()


def _cut_off(path):
    path.write_bytes(path.read_bytes()[:-5])


def _one_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _rewrite(**arrays):
    def rewrite(path):
        found = checkpoints.open_checkpoint(path)
        changed = {name: found.read(name) for name in found.leaves} | arrays
        present = {name: array for name, array in changed.items() if array is not None}
        checkpoints.write_safetensors(path, present, dict(found.metadata))

    return rewrite


def _without_plan(path):
    jaxpruner.save_safetensors(random(SHAPES), path)


def _with_a_plan(plan):
    def save(path):
        jaxpruner.save_safetensors(random(SHAPES), path, metadata={'jaxpruner_plan': plan})

    return save


ANOTHER_INDEX = '{"version": 1, "groups": {"up[1]": {"size": 6, "keep": [0, 9]}}}'
SPOILT = {
    'half written': (_cut_off, r'small\.safetensors is no safetensors file, or only a part'),
    'one bit is another': (_one_bit, r'small\.safetensors: the bytes of \w+ are damaged'),
    'no plan': (_without_plan, r'small\.safetensors has no plan of channels .*jaxpruner_plan'),
    'no such plan': (_with_a_plan('{}'), r"no plan of channels of this model \('version'\)"),
    'no JSON': (_with_a_plan('{'), r'no plan of channels of this model'),
    'another version': (_with_a_plan('{"version": 2}'), 'its version is 2, and 1 is read'),
    'another index': (_with_a_plan(ANOTHER_INDEX), r"keep\['up\[1\]'\] has 9"),
    'another shape': (
        _rewrite(down=np.ones((4, 2), np.float32)),
        r'small\.safetensors: down has shape \(4, 2\), and by its plan \(3, 2\)',
    ),
    'a leaf too few': (_rewrite(bias=None), r'small\.safetensors: bias has shape None'),
    'a leaf too many': (_rewrite(more=np.ones(2)), r'small\.safetensors: more has shape \(2,\)'),
}


@pytest.mark.parametrize(('spoil', 'message'), SPOILT.values(), ids=SPOILT)
def test_files_that_are_not_what_they_say_are_refused(path, spoil, message):
    spoil(path)
    with pytest.raises(ValueError, match=message):
        jaxpruner.load_small_model(graph_of(), path)


def test_models_of_other_shapes_are_refused(path):
    with pytest.raises(ValueError, match=r'this model .up\[1\] has 6 channels there, and 8 here'):
        jaxpruner.load_small_model(graph_of({'up': (3, 8), 'bias': (8,), 'down': (8, 2)}), path)
