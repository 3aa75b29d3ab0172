"""A pytree as one safetensors file: names, dtypes, shards, and what is refused."""

import collections
import gc
import itertools
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices
from jaxpruner import checkpoints
from jaxpruner.files import dtypes

Point = collections.namedtuple('Point', 'x y')

TREE = {
    'block': [
        {'kernel': jnp.arange(6.0).reshape(2, 3), 'bias': None},
        {'kernel': jnp.zeros((2, 2), jnp.bfloat16)},
    ],
    'point': Point(np.array([1, 2], np.int64), jnp.array([True, False])),
    'step': jnp.int32(7),
}


def saved(tree, path, **more):
    jaxpruner.save_safetensors(tree, path, **more)
    checkpoint = checkpoints.open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.leaves}


def assert_same_arrays(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_leaves_have_dotted_names(tmp_path):
    expected = {
        'block.0.kernel': TREE['block'][0]['kernel'],
        'block.1.kernel': TREE['block'][1]['kernel'],
        'point.x': TREE['point'].x,
        'point.y': TREE['point'].y,
        'step': TREE['step'],
    }
    path = tmp_path / 'a.safetensors'
    assert_same_arrays(saved(TREE, str(path), metadata={'sparsity': '0.9'}), expected)
    assert checkpoints.open_checkpoint(path).metadata == {'sparsity': '0.9'}


def test_every_tensor_begins_where_its_dtype_may(tmp_path):
    rows = itertools.product(dtypes.SAFETENSORS.values(), [(), (0, 3), (3,)])
    tree = {f'{dtype} {shape}': np.ones(shape, dtype) for dtype, shape in rows}
    assert_same_arrays(saved(tree, tmp_path / 'a.safetensors'), tree)
    leaves = checkpoints.open_checkpoint(tmp_path / 'a.safetensors').leaves
    widths = [leaf.dtype.itemsize for leaf in leaves.values()]
    assert widths == sorted(widths, reverse=True)


def test_models_and_numbers(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    found = saved(nnx.state(model, nnx.Param), tmp_path / 'a.safetensors')
    assert found.keys() == {'kernel', 'bias'}
    assert saved({'steps': 3, 'rate': 0.5}, tmp_path / 'b.safetensors') == {'steps': 3, 'rate': 0.5}
    assert saved(jnp.ones(2), tmp_path / 'c.safetensors').keys() == {'kernel'}
    assert saved({}, tmp_path / 'd.safetensors') == {}


REFUSED = [
    ({'a.b': np.ones(1), 'a': {'b': np.ones(1)}}, ValueError, r"\('a', 'b'\) and .*'a\.b'"),
    ({'__metadata__': np.ones(1)}, ValueError, '^__metadata__: '),
    ({'a': {'key': jax.random.key(0)}}, TypeError, r'^a\.key: .*key_data'),
    ({'a': {'name': 'text'}}, TypeError, r'^a\.name: .*str'),
    ({'a': jax.ShapeDtypeStruct((2,), jnp.float32)}, TypeError, r'^a: .*ShapeDtypeStruct'),
    ({'a': {'apply': jnp.tanh}}, TypeError, r'^a\.apply: '),
    ({'a': {'wide': np.ones(1, np.complex128)}}, ValueError, r'a\.wide has dtype complex128'),
    ({'a': {'narrow': jnp.ones(2, jnp.int4)}}, ValueError, r'a\.narrow has dtype int4'),
]


def test_refused_leaves_are_named(tmp_path):
    path = tmp_path / 'a.safetensors'
    for tree, error, words in REFUSED:
        with pytest.raises(error, match=words):
            jaxpruner.save_safetensors(tree, path)
    with pytest.raises(TypeError, match=r'^w: .*outside jit'):
        jax.jit(lambda w: jaxpruner.save_safetensors({'w': w}, path))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"'sparsity': 0\.9"):
        jaxpruner.save_safetensors(TREE, path, metadata={'sparsity': 0.9})
    assert not list(tmp_path.iterdir())


def test_the_extra_that_is_missing_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith('jaxpruner.checkpoints')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(jaxpruner, 'checkpoints')
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    with pytest.raises(ImportError, match=r'jaxpruner\[checkpoint\]'):
        jaxpruner.save_safetensors(TREE, tmp_path / 'a.safetensors')


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def sharding(*spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))
    return NamedSharding(mesh, PartitionSpec(*spec))


def check_sharded_arrays_are_saved_whole(tmp_path):
    values = np.arange(128.0, dtype=np.float32).reshape(16, 8)
    specs = [('rows', 'columns'), ('columns',), ()]
    tree = {str(spec): jax.device_put(values, sharding(*spec)) for spec in specs}
    tree['on one'] = jax.device_put(values, jax.devices()[3])
    assert_same_arrays(saved(tree, tmp_path / 'a.safetensors'), dict.fromkeys(tree, values))


def check_one_leaf_is_on_the_host_at_a_time(tmp_path):
    values = np.ones((256, 1024), np.float32)
    tree = {f'w{i}': jax.device_put(values, sharding('rows', 'columns')) for i in range(8)}
    tracemalloc.start()
    try:
        jaxpruner.save_safetensors(tree, tmp_path / 'a.safetensors')
        gc.collect()  # JAX 0.12 frees the last copy only then
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * values.nbytes
    assert left < values.nbytes
