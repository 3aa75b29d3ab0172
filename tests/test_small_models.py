"""Smaller models in files: what is read back is what was saved, and belongs to the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import checkpoints, load_small_model, save_small_model
from jaxpruner.structure import channel_groups

X = jax.ShapeDtypeStruct((5, 3), jnp.float32)
SHAPES = {'up': (3, 6), 'bias': (6,), 'down': (6, 2)}
KEEP = {'up[1]': np.array([0, 2, 5])}


def apply(params, x):
    return jax.nn.relu(x @ params['up'] + params['bias']) @ params['down']


def random(shapes, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def graph_of(shapes=SHAPES):
    return channel_groups(apply, jax.eval_shape(lambda: random(shapes)), X)


PARAMS, GRAPH = random(SHAPES), graph_of()


@pytest.fixture
def small(tmp_path):
    path = tmp_path / 'small.safetensors'
    save_small_model(GRAPH, GRAPH.shrink(PARAMS, KEEP), KEEP, path)
    return path


def test_it_is_read_back_with_shapes_alone(small):
    x, loaded = random({'x': (5, 3)}, seed=1)['x'], load_small_model(GRAPH, small)
    found = GRAPH.small_apply(loaded.keep)(loaded.params, x)
    np.testing.assert_allclose(found, apply(GRAPH.zeroed(PARAMS, KEEP), x), rtol=1e-5)
    assert [path.name for path in small.parent.iterdir()] == [small.name]


def test_lists_of_layers_are_read_back(tmp_path):
    params = {'up': jnp.ones((3, 2, 6)), 'down': jnp.ones((3, 6, 2))}

    def layer(x, p):
        return jnp.tanh(x @ p['up']) @ p['down'], None

    graph = channel_groups(lambda p, x: jax.lax.scan(layer, x, p)[0], params, jnp.ones((5, 2)))
    keep = {'up[2]': [[0, 1], [2, 4], [3, 5]]}
    save_small_model(graph, graph.shrink(params, keep, verify=False), keep, tmp_path / 'small')
    np.testing.assert_array_equal(
        load_small_model(graph, tmp_path / 'small').keep['up[2]'], keep['up[2]']
    )


def normalized(params, state, x):
    hidden = (x @ params['up'] - state['mean']) * params['bias']
    return hidden @ params['down'], {'mean': 0.9 * state['mean'] + hidden.mean(0)}


def test_a_state_is_saved_beside_the_parameters(tmp_path):
    state, path = random({'mean': (6,)}, seed=2), tmp_path / 'small.safetensors'
    graph = channel_groups(normalized, PARAMS, X, state=state)
    params, small_state = graph.shrink(PARAMS, KEEP, verify=False), graph.shrink(state, KEEP)
    for saved in (small_state, None):
        save_small_model(graph, params, KEEP, path, state=saved)
        small = load_small_model(graph, path)
        jax.tree.map(np.testing.assert_array_equal, small.params, params)
        jax.tree.map(np.testing.assert_array_equal, small.state, saved)


NOT_SMALL = [
    (PARAMS, {}, r'bias has shape \(6,\).*\(3,\)'),
    ({'up': PARAMS['up']}, {}, r'parameters .*another structure'),
    (GRAPH.shrink(PARAMS, KEEP), {'state': PARAMS}, 'state has another structure'),
]


def test_what_is_no_small_model_is_not_saved(tmp_path):
    for params, settings, words in NOT_SMALL:
        with pytest.raises(ValueError, match=words):
            save_small_model(GRAPH, params, KEEP, tmp_path / 'small.safetensors', **settings)
    assert not list(tmp_path.iterdir())


def with_arrays(**arrays):
    """Other arrays in the file, or none of a name."""

    def rewrite(path):
        found = checkpoints.open_checkpoint(path)
        changed = {name: found.read(name) for name in found.leaves} | arrays
        present = {name: array for name, array in changed.items() if array is not None}
        checkpoints.write_safetensors(path, present, dict(found.metadata))

    return rewrite


def with_bytes(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def with_plan(plan):
    metadata = {} if plan is None else {'jaxpruner_plan': plan}
    return lambda path: checkpoints.write_safetensors(path, {'w': np.ones(2)}, metadata)


ANOTHER_INDEX = '{"version": 1, "groups": {"up[1]": {"size": 6, "keep": [0, 9]}}}'
NOT_THREE = np.ones((4, 2), np.float32)
SPOILT = [
    (with_bytes(lambda content: content[:-5]), 'is no safetensors file, or only a part'),
    (with_bytes(lambda c: c[:-1] + bytes([c[-1] ^ 1])), 'its arrays are damaged'),
    (with_plan(None), 'has no plan of channels .*jaxpruner_plan'),
    (with_plan('{}'), r"has no plan of channels of this model \('version'\)"),
    (with_plan('{'), 'no plan of channels of this model'),
    (with_plan('{"version": 2}'), 'its version is 2, and 1 is read'),
    (with_plan(ANOTHER_INDEX), r"keep\['up\[1\]'\] has 9"),
    (with_arrays(down=NOT_THREE), r'down has shape \(4, 2\), and by its plan \(3, 2\)'),
    (with_arrays(bias=None), 'bias has shape None'),
    (with_arrays(more=np.ones(2)), r'more has shape \(2,\)'),
]


@pytest.mark.parametrize(('spoil', 'message'), SPOILT)
def test_files_that_are_not_what_they_say_are_refused(small, spoil, message):
    spoil(small)
    with pytest.raises(ValueError, match=rf'small\.safetensors.*{message}'):
        load_small_model(GRAPH, small)


def test_models_of_other_shapes_are_refused(small):
    with pytest.raises(ValueError, match=r'this model .up\[1\] has 6 channels there, and 8 here'):
        load_small_model(graph_of({'up': (3, 8), 'bias': (8,), 'down': (8, 2)}), small)
