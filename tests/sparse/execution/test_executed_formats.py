"""What each format stores, and that it multiplies as the dense matrix does; patterns of zeros."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpruner.sparse.execution.executed_formats import table
from jaxpruner.sparse.execution.executed_formats.blocks import ExecutedBlocks
from jaxpruner.sparse.execution.executed_formats.csr import ExecutedCsr
from jaxpruner.sparse.execution.executed_formats.smaller import ExecutedSmaller
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern, digest
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.program.models import find_products

RNG = np.random.default_rng(0)
has_csr = csr_kernel.why_missing(jnp.float32) is None
needs_csr = pytest.mark.skipif(not has_csr, reason='this JAX has no CSR kernel')
FORMATS = [
    pytest.param(ExecutedCsr(), marks=needs_csr),
    ExecutedSmaller(),
    ExecutedBlocks((2, 4)),
    ExecutedBlocks((3, 5)),  # divides neither axis
]


def matrix_leaf_of(shape):
    def apply_fn(p, x):
        return x @ p['w']

    products = find_products(apply_fn, {'w': jnp.ones(shape)}, jnp.ones((6, shape[0])))
    return products.by_leaf['w']


def matrices_with(layers, inputs, outputs, kept):
    """Random matrices in which `kept` says of `[layers, inputs, outputs]` what is not zero."""
    values = RNG.normal(size=(layers, inputs, outputs)).astype(np.float32)
    return np.where(kept, values, 0)


def random_zeros(seed, layers=2, inputs=16, outputs=12):
    """Zeros of all kinds: single weights, blocks, inputs, outputs, and a layer of zeros."""
    random = np.random.default_rng(seed)
    kept = random.random((layers, inputs, outputs)) < random.choice([0.02, 0.3, 1.0])
    kept &= random.random((layers, inputs, 1)) < random.choice([0.3, 1.0])
    kept &= random.random((layers, 1, outputs)) < random.choice([0.3, 1.0])
    kept &= np.repeat(random.random((layers, inputs // 2, 1)) < 0.5, 2, axis=1)
    return matrices_with(layers, inputs, outputs, kept & (random.random((layers, 1, 1)) < 0.9))


@pytest.mark.parametrize('format', FORMATS, ids=str)
@hypothesis.given(seed=st.integers(0, 2**16))
@hypothesis.settings(max_examples=8)
def test_a_format_multiplies_as_the_dense_matrix(format, seed):
    matrices = random_zeros(seed)
    matrix_leaf = matrix_leaf_of(matrices.shape[1:])
    arrays = format.pack(matrices, matrix_leaf)
    rows = RNG.normal(size=(6, 16)).astype(np.float32)
    for layer, matrix in enumerate(matrices):
        operator = format.operator(
            {key: jnp.asarray(a[layer]) for key, a in arrays.items()}, matrix_leaf
        )
        np.testing.assert_allclose(operator.multiply(rows), rows @ matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('format', FORMATS, ids=str)
def test_a_format_has_the_derivatives_of_the_dense_matrix(format):
    matrix = random_zeros(3, layers=1)
    matrix_leaf = matrix_leaf_of(matrix.shape[1:])
    packed = {key: jnp.asarray(array[0]) for key, array in format.pack(matrix, matrix_leaf).items()}
    rows = jnp.asarray(RNG.normal(size=(6, 16)), jnp.float32)

    def loss(rows, arrays):
        return jnp.sin(format.operator(arrays, matrix_leaf).multiply(rows)).sum()

    def dense_loss(rows, matrix):
        return jnp.sin(rows @ matrix).sum()

    of_rows, of_arrays = jax.grad(loss, (0, 1), allow_int=True)(rows, packed)
    expected, of_matrix = jax.grad(dense_loss, (0, 1))(rows, jnp.asarray(matrix[0]))
    np.testing.assert_allclose(of_rows, expected, rtol=1e-4, atol=1e-5)
    # A step along the derivative changes the stored weights as it changes those of the dense matrix.
    gradients = np.where(matrix != 0, of_matrix, 0)
    moved = format.pack(np.where(matrix != 0, matrix - 1e-3 * gradients, 0), matrix_leaf)
    for key in packed:
        if jnp.issubdtype(packed[key].dtype, jnp.floating):
            is_stored = packed[key] != 0
            step = np.where(is_stored, packed[key] - 1e-3 * of_arrays[key], 0)
            np.testing.assert_allclose(
                step, np.where(is_stored, moved[key][0], 0), rtol=1e-4, atol=1e-6
            )


def convolved(p, x):
    return jax.lax.conv_general_dilated(
        x, p['w'], (2, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )


@pytest.mark.parametrize('format', FORMATS, ids=str)
@pytest.mark.parametrize('window', [(1, 1), (3, 2)])
def test_convolutions(format, window):
    kernel = RNG.normal(size=(*window, 6, 10)).astype(np.float32)
    kernel[..., [0, 3], :] = 0
    kernel[..., 4:] = 0
    params, image = (
        {'w': jnp.asarray(kernel)},
        jnp.asarray(RNG.normal(size=(2, 5, 4, 6)), jnp.float32),
    )
    products = find_products(convolved, params, image)
    matrix_leaf = products.by_leaf['w']
    matrix = np.asarray(matrix_leaf.to_matrix(params['w']))[None]
    arrays = {key: jnp.asarray(array[0]) for key, array in format.pack(matrix, matrix_leaf).items()}
    weights = products.put(params, {'w': format.operator(arrays, matrix_leaf)})
    result = products.apply(weights, image)
    np.testing.assert_allclose(result, convolved(params, image), rtol=1e-4, atol=1e-4)
    if isinstance(format, ExecutedSmaller):
        assert arrays['matrix'].shape == (window[0] * window[1] * 4, 4)


def test_blocks_keep_as_many_for_each_group():
    kept = np.zeros((2, 8, 8), bool)
    kept[0, 0:2, 0:4] = kept[0, 4:6, 0:4] = kept[1, 6, 7] = True
    arrays = ExecutedBlocks((2, 4)).pack(matrices_with(2, 8, 8, kept), matrix_leaf_of((8, 8)))
    assert arrays['values'].shape == (2, 2, 2, 2, 4)
    assert arrays['indices'].tolist() == [[[0, 2], [0, 1]], [[0, 1], [3, 0]]]


def test_csr_is_that_of_the_matrix_transposed():
    matrix = np.array([[[0, 3.0], [5, 7]], [[0, 0], [2, 0]]], np.float32)
    arrays = ExecutedCsr().pack(matrix, matrix_leaf_of((2, 2)))
    # The second layer is filled up with zeros behind its last row.
    assert arrays['compressed'].tolist() == [[5, 3, 7], [2, 0, 0]]
    assert arrays['row_offsets'].tolist() == [[0, 1, 3], [0, 1, 1]]
    assert arrays['column_indices'].tolist() == [[1, 0, 1], [1, 0, 0]]


def test_bytes():
    arrays = ExecutedSmaller().pack(
        matrices_with(1, 8, 8, np.arange(8) < 4), matrix_leaf_of((8, 8))
    )
    assert {key: array.shape for key, array in arrays.items()} == {
        'matrix': (1, 8, 4),
        'outputs': (1, 8),
    }
    assert table.size_in_bytes(arrays) == 4 * 32 + 4 * 8


@pytest.mark.parametrize('text', ['csr', 'smaller', 'blocks 8x128'])
def test_names_are_read_as_they_are_written(text):
    assert str(table.parse(text)) == text


@pytest.mark.parametrize('text', ['bcsr', 'blocks 8', 'blocks 0x8', 'blocks 8x128 ', 3, None, ''])
def test_an_unknown_name_is_refused(text):
    with pytest.raises(ValueError, match=r'no format.*csr, smaller, blocks'):
        table.parse(text)


def test_bfloat16_has_no_csr_kernel():
    def apply_fn(p, x):
        return x @ p['w']

    params = {'w': jnp.ones((8, 8), jnp.bfloat16)}
    matrix_leaf = find_products(apply_fn, params, jnp.ones((2, 8), jnp.bfloat16)).by_leaf['w']
    pattern = ZeroPattern.of(np.eye(8)[None])
    candidates, refused = table.candidates(matrix_leaf, pattern)
    assert 'bfloat16' in refused['csr']
    assert ExecutedCsr() not in candidates


@pytest.mark.parametrize(
    ('kept', 'expected'),
    [
        (np.ones((64, 256), bool), []),
        (np.kron(np.eye(2), np.ones((32, 128))) > 0, [(32, 128)]),
        (np.kron(np.eye(8), np.ones((8, 32))) > 0, [(8, 32)]),
    ],
    ids=['dense', 'wide', 'narrow'],
)
def test_the_best_blocks_are_those_of_the_mask(kept, expected):
    blocks = ZeroPattern(kept[None]).best_blocks(0.85, 1)
    assert [block[1] for block in blocks] == [block[1] for block in expected]
    for block in blocks:
        assert ZeroPattern(kept[None]).block_share(block) == kept.mean()


def test_a_digest_tells_zeros_and_shapes_apart():
    names = [
        digest({name: ZeroPattern.of(np.reshape(values, shape))})
        for name, values, shape in [
            ('w', [1, 0, 2, 3], (2, 2)),
            ('w', [1, 2, 0, 3], (2, 2)),
            ('w', [1, 0, 2, 3], (1, 4)),
            ('v', [1, 0, 2, 3], (2, 2)),
        ]
    ]
    assert len(set(names)) == 4
    assert names[0] == digest({'w': ZeroPattern.of(np.array([[-5.0, -0.0], [np.nan, 1]]))})
