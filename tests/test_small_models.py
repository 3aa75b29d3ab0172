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


def _with_another_plan(path):
    jaxpruner.save_safetensors(random(SHAPES), path, metadata={'jaxpruner_plan': '{}'})


SPOILT = {
    'half written': (_cut_off, r'small\.safetensors is no safetensors file, or only a part'),
    'one bit is another': (_one_bit, r'small\.safetensors: the bytes of \w+ are damaged'),
    'no plan': (_without_plan, r'small\.safetensors has no plan of channels'),
    'no such plan': (_with_another_plan, r'small\.safetensors is no plan of channels'),
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
    with pytest.raises(ValueError, match=r'plan of another model: \w+ is \[6\] there, and \[8\]'):
        jaxpruner.load_small_model(graph_of({'up': (3, 8), 'bias': (8,), 'down': (8, 2)}), path)
