"""What is packed comes back bit by bit: all dtypes, shapes, sparsities and patterns, in memory and from a file."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpruner import sparse
from jaxpruner.files import dtypes
from jaxpruner.sparse.formats import table
from jaxpruner.sparse.formats.leaf_arrays import Kept
from jaxpruner.sparse.storage import packed_files

DTYPES = list(dtypes.PACKED)


def random_bits(rng, shape, dtype):
    """Any bits: NaN with payloads, -0.0, subnormal numbers."""
    dtype = dtypes.PACKED[dtype]
    if dtype.kind == 'b':
        return rng.integers(2, size=shape).astype(bool)
    if dtype.name in ('int1', 'int2', 'int4', 'uint1', 'uint2', 'uint4') or dtype.name.startswith(
        ('float6', 'float4')
    ):
        return rng.integers(0, 2, size=shape).astype(dtype)  # not every byte is one of them
    size = math.prod(shape) * dtype.itemsize
    return rng.integers(256, size=size, dtype=np.uint8).view(dtype).reshape(shape)


def bits(array):
    array = np.asarray(array, order='C')
    return array.reshape(-1).view(np.uint8)


def assert_same_bits(found, expected):
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(bits(found), bits(expected))


def bytes_of(arrays):
    """The bytes that grow with the leaf."""
    return sum(value.nbytes for key, value in arrays.items() if key not in ('shape', 'pattern'))


def scattered(rng, shape, share):
    return rng.random(shape) < share


def grouped(rng, shape, share):
    """N:M along the last axis that 4 divides, and whatever there is otherwise."""
    axes = [axis for axis in range(len(shape)) if shape[axis] and shape[axis] % 4 == 0]
    if not axes:
        return scattered(rng, shape, share)
    moved = np.moveaxis(np.empty(shape), axes[-1], -1).shape
    ranks = rng.random((*moved[:-1], moved[-1] // 4, 4)).argsort(-1)
    n = 1 + round(2 * share)
    return np.moveaxis((ranks < n).reshape(moved), -1, axes[-1])


def in_blocks(rng, shape, share):
    if len(shape) < 2:
        return scattered(rng, shape, share)
    height, width = (next(side for side in (4, 3, 2, 1) if n % side == 0) for n in shape[-2:])
    grid = rng.random((*shape[:-2], shape[-2] // height, shape[-1] // width)) < share
    return grid.repeat(height, -2).repeat(width, -1)


PATTERNS = {'scattered': scattered, 'N:M': grouped, 'blocks': in_blocks}

shapes = st.lists(st.integers(0, 24), max_size=4).map(tuple).filter(lambda s: math.prod(s) < 20000)


@settings(max_examples=150)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    pattern=st.sampled_from(list(PATTERNS)),
    share=st.sampled_from([0.0, 0.01, 0.05, 0.25, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
@example(shape=(64, 64), dtype='bfloat16', pattern='N:M', share=0.5, seed=0)
@example(shape=(3, 3, 16, 64), dtype='int8', pattern='blocks', share=0.25, seed=0)
@example(shape=(300, 70), dtype='float8_e5m2', pattern='scattered', share=0.01, seed=0)
def test_every_fitting_format_keeps_every_bit(shape, dtype, pattern, share, seed):
    """Each format by itself, the planned arrays being those that are made, and the smallest in memory."""
    rng = np.random.default_rng(seed)
    mask = PATTERNS[pattern](rng, shape, share)
    array = random_bits(rng, shape, dtype)
    array[~mask] = np.zeros((), array.dtype)
    found = packed_files.kept_weights('w', array, None)
    for name, plan in table.plans_of(found, array.itemsize).items():
        arrays = table.FORMATS[name].pack(array, found.mask, plan.settings)
        assert bytes_of(arrays) == plan.bytes, name
        assert table.check(name, arrays) == shape
        assert_same_bits(table.FORMATS[name].unpack(arrays), array)
        assert not (found.mask & (table.stored_mask(name, arrays) == 0)).any(), name
    assert_same_bits(sparse.unpack(sparse.pack(array)), array)
    # A mask that is given comes back, also where weights of it are zero.
    array[rng.random(shape) < 0.3] = np.zeros((), array.dtype)
    name, arrays = packed_files.pack_leaf('w', array, jnp.asarray(mask, jnp.uint8))
    assert_same_bits(table.FORMATS[name].unpack(arrays), array)
    assert mask.all() if name == 'dense' else (table.stored_mask(name, arrays) == mask).all()


@pytest.mark.parametrize('dtype', DTYPES)
def test_files_hold_every_dtype(dtype, tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / 'a.safetensors'
    tree = {'empty': random_bits(rng, (0, 3), dtype), 'scalar': random_bits(rng, (), dtype)}
    for pattern, draw in PATTERNS.items():
        for share in (0.03, 0.5):
            array = random_bits(rng, (24, 3, 64), dtype)
            array[~draw(rng, array.shape, share)] = np.zeros((), array.dtype)
            tree[f'{pattern} {share}'] = array
    sparse.save(path, tree)
    loaded = sparse.load(path)
    assert loaded.keys() == tree.keys()
    for name, array in tree.items():
        assert_same_bits(loaded[name], array)
    # Other libraries read every tensor of the file.
    with safetensors.safe_open(path, 'numpy') as file:
        assert all(file.get_tensor(name) is not None for name in file.offset_keys())


SMALLEST = [
    ('scattered', 1.0, (64, 64), 'dense'),
    ('scattered', 0.1, (4, 4), 'dense'),
    ('scattered', 0.5, (64, 64), 'bitmask'),
    ('scattered', 0.1, (256, 256), 'bitmask'),
    ('scattered', 0.02, (256, 256), 'csr'),
    ('N:M', 0.5, (64, 64), 'n_by_m'),
    ('N:M', 0.5, (3, 64, 63), 'n_by_m'),  # along an inner axis
    ('blocks', 0.2, (256, 256), 'blocks'),
]


def test_the_smallest_format_is_chosen(tmp_path):
    for pattern, share, shape, expected in SMALLEST:
        array = np.where(PATTERNS[pattern](np.random.default_rng(0), shape, share), 1.5, 0.0)
        array = array.astype(np.float32)
        sparse.save(tmp_path / 'a.safetensors', {'w': array})
        assert sparse.open_packed(tmp_path / 'a.safetensors').formats == {'w': expected}
        sizes = [plan.bytes for plan in table.plans_of(Kept(array != 0), array.itemsize).values()]
        if expected != 'dense':
            assert bytes_of(sparse.pack({'w': array})['w']) <= 1.02 * min(sizes)


def test_transposed_views_are_stored_in_their_own_order(tmp_path):
    array = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    thin = np.zeros((256, 128), np.float32)
    thin[3, 5] = 2.0
    tree = {'dense': array.T, 'thin': thin.T, 'strided': thin[::2, ::3], 'backwards': array[::-1]}
    sparse.save(tmp_path / 'a.safetensors', tree)
    for found in (sparse.load(tmp_path / 'a.safetensors'), sparse.unpack(sparse.pack(tree))):
        for name in tree:
            assert_same_bits(found[name], tree[name])
    raw = safetensors.numpy.load_file(tmp_path / 'a.safetensors')
    np.testing.assert_array_equal(raw['dense'], array.T)
