"""Trees of every kind: containers, masks of optimizer states, models, checkpoints, devices, and what is refused."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices
from jaxpruner import checkpoints, sparse

Point = collections.namedtuple('Point', 'x y')


def eye(size=64, dtype=np.float32):
    return np.eye(size, dtype=dtype)


TREE = {
    'layers': [{'kernel': eye(), 'bias': None}, {'kernel': jnp.eye(64, dtype=jnp.bfloat16)}],
    'point': Point(np.array([1, 2], np.int64), jnp.array([True, False])),
    'dotted.name': np.zeros((64, 64), np.float32),
    'step': jnp.int32(7),
    'narrow': [jnp.eye(64, dtype=jnp.float8_e4m3fn), jnp.eye(64).astype(jnp.int4)],
}


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


def test_containers_come_back_by_name_or_as_they_were(tmp_path):
    path = tmp_path / 'a.safetensors'
    sparse.save(path, TREE, metadata={'run': '8'})
    packed = sparse.pack(TREE)
    for found in (sparse.load(path), sparse.unpack(packed)):
        assert list(found['layers']) == ['0', '1']
        assert found['point']['x'].tolist() == [1, 2]
        assert found['dotted.name'].shape == (64, 64)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), TREE)
    for like in (TREE, shapes):
        assert_same(sparse.load(path, like=like), TREE)
        assert_same(sparse.unpack(packed, like=like), TREE)
    file = sparse.open_packed(path)
    assert file.metadata == {'run': '8'}
    assert file.paths['layers.0.kernel'] == ('layers', '0', 'kernel')
    assert isinstance(file, checkpoints.Checkpoint)
    np.testing.assert_array_equal(file.read('layers.0.kernel'), eye(64))
    with pytest.raises(KeyError, match=r"a\.safetensors has no leaf 'sted'.*'step'"):
        file.read('sted')


def test_names_of_any_letters(tmp_path):
    tree = {'': np.ones(2), 'ü "quoted"': {'\n': eye(256), '/': np.zeros(3)}, 'a': {'': eye(256)}}
    sparse.save(tmp_path / 'a.safetensors', tree)
    assert_same(sparse.load(tmp_path / 'a.safetensors'), tree)
    assert_same(sparse.load(tmp_path / 'a.safetensors', like=tree), tree)
    assert_same(sparse.unpack(sparse.pack(tree)), tree)
    for bare in (np.float32(3), eye(256), jnp.ones(2)):
        sparse.save(tmp_path / 'a.safetensors', bare)
        assert_same(sparse.load(tmp_path / 'a.safetensors', like=bare), bare)
        assert_same(sparse.unpack(sparse.pack(bare)), np.asarray(bare))


def test_masks_of_an_optimizer_state(tmp_path):
    """The masks come back exactly, although weights of them are zero, and the state itself is saved, too."""
    pruner = jaxpruner.MagnitudePruning(
        sparsity_type='2:4', scheduler=jaxpruner.OneShotSchedule(0), use_packed_masks=True
    )
    tx = optax.chain(optax.clip(1.0), pruner.wrap_optax(optax.adam(1e-3)))
    params = {'w': jax.random.normal(jax.random.key(0), (64, 128)), 'b': jnp.ones(128)}
    opt_state = tx.init(params)
    _, opt_state = jax.jit(tx.update)(params, opt_state, params)
    masks = jaxpruner.unpack_masks(jaxpruner.sparse_states(opt_state)[0].masks, params)
    params = jaxpruner.apply_mask(params, masks)
    params['w'] = params['w'].at[:, ::3].set(0.0)  # regrown at zero
    path = tmp_path / 'a.safetensors'
    sparse.save(path, params, masks=opt_state)
    assert_same(sparse.load(path, like=params), params)
    np.testing.assert_array_equal(sparse.open_packed(path).stored_mask('w'), masks['w'])
    assert sparse.open_packed(path).stored_mask('b') is None
    assert_same(sparse.unpack(sparse.pack(opt_state), like=opt_state), opt_state)


def test_packed_trees_go_through_checkpoints_without_a_target(tmp_path):
    tree = {'w': jnp.eye(64), 'b': jnp.ones(3), 'deep': {'v': jnp.eye(32, dtype=jnp.bfloat16)}}
    packed = sparse.pack(tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'packed', packed)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'packed')
    assert_same(sparse.unpack(restored, like=tree), tree)


def test_checkpoints_are_packed_under_their_names(tmp_path):
    jaxpruner.save_safetensors({'a': {'w': eye()}, 'b': np.ones(2)}, tmp_path / 'dense.safetensors')
    masks = {'a.w': (np.eye(64) + np.eye(64, k=1)).astype(np.uint8), 'b': None}
    path = tmp_path / 'packed.safetensors'
    dense = checkpoints.open_checkpoint(tmp_path / 'dense.safetensors')
    sparse.save(path, dense, masks=masks)
    np.testing.assert_array_equal(sparse.load(path)['a.w'], eye())
    np.testing.assert_array_equal(sparse.open_packed(path).stored_mask('a.w'), masks['a.w'])
    like = {'a': {'w': eye()}, 'b': np.ones(2)}
    assert_same(sparse.load(path, like=like), like)


LIKE = {'a': eye(dtype=np.float16)}
REFUSED = [  # what to call, with which error
    (lambda: sparse.pack({'a': {'b': np.array([None])}}), TypeError, r'^a\.b: object'),
    (lambda: sparse.pack({'a.b': eye(), 'a': {'b': eye()}}), ValueError, r"'a\.b'"),
    (lambda: sparse.pack(sparse.pack({'a': eye(256)})), ValueError, r'^a has the keys .*unpack'),
    (lambda: sparse.pack({'a': eye()}, masks={'a': eye(32)}), ValueError, r'^a: .*\(32, 32\)'),
    (
        lambda: sparse.pack({'a': -jnp.zeros(4)}, masks={'a': jnp.array([1, 1, 0, 0])}),
        ValueError,
        r'^a: 2 weights .*apply_mask',
    ),
    (
        lambda: sparse.unpack({'a': eye()}, like={'a': eye(), 'b': eye()}),
        ValueError,
        "leaf 'b'.*'a'",
    ),
    (
        lambda: sparse.unpack(sparse.pack({'a': eye()}), like=LIKE),
        ValueError,
        '^a is float32.*float16',
    ),
]


@pytest.mark.parametrize(('call', 'error', 'words'), REFUSED)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


REFUSED_FILES = [  # a tree, settings, with which error
    (TREE, {'metadata': {'sparsity': 0.9}}, TypeError, r"'sparsity': 0\.9"),
    (TREE, {'metadata': {'jaxpruner_sparse': '{}'}}, ValueError, 'metadata: jaxpruner_sparse'),
    ({'w': eye(256), 'w.compressed': np.ones(2)}, {}, ValueError, r"'w\.compressed'.*rename"),
    ({'__metadata__': np.ones(2)}, {}, ValueError, '^__metadata__: .*rename'),
]


def test_refused_files(tmp_path):
    path = tmp_path / 'a.safetensors'
    for tree, settings, error, words in REFUSED_FILES:
        with pytest.raises(error, match=words):
            sparse.save(path, tree, **settings)
    with pytest.raises(FileNotFoundError, match='nowhere'):
        sparse.save(tmp_path / 'nowhere' / 'a.safetensors', TREE)
    assert not list(tmp_path.iterdir())
    sparse.save(path, {'w': np.float64(1)})
    with pytest.raises(FileExistsError, match=r'a\.safetensors'):
        sparse.save(path, TREE, overwrite=False)
    with pytest.raises(ValueError, match=r'a\.safetensors: .*no leaf'):
        sparse.load(path, like={'v': eye()})
    with pytest.raises(ValueError, match=r'a\.safetensors: w is float64'):
        sparse.load(path, like={'w': jax.device_put(1.0)})


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def sharding(*spec):
    devices = np.array(jax.devices()).reshape(4, 2)
    return NamedSharding(Mesh(devices, ('rows', 'columns')), PartitionSpec(*spec))


@pytest.mark.parametrize('spec', [('rows', 'columns'), ()], ids=str)
def check_sharded_arrays_are_stored_whole(spec, tmp_path):
    values = eye(64)
    tree = {'w': jax.device_put(values, sharding(*spec))}
    mask = jax.device_put(values.astype(np.uint8), sharding(*spec))
    path = tmp_path / 'a.safetensors'
    sparse.save(path, tree, masks={'w': mask})
    for found in (
        sparse.load(path, like=tree)['w'],
        sparse.unpack(sparse.pack(tree), like=tree)['w'],
    ):
        assert found.sharding == tree['w'].sharding
        np.testing.assert_array_equal(found, values)
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding(*spec))
    assert sparse.load(path, like={'w': shape})['w'].sharding == tree['w'].sharding
