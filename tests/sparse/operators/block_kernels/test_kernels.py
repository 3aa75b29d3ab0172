"""Kernels compute on a simulated device what the product without them does, and are accepted by their compilers."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.sparse.operators.block_kernels import choosing
from sparse.operators.block_kernels.cases import (
    assert_close,
    case,
    in_kernels,
    without_kernels,
)

NEEDS = {'tpu': (0, 6, 2), 'gpu': (0, 10, 0)}
LOWERED_FOR = {'tpu': ('tpu', 'tpu_custom_call'), 'gpu': ('cuda', 'mosaic_gpu_v2')}
LOWERED = [
    (platform, dtype, block)
    for platform, dtypes in choosing.DTYPES.items()
    for dtype in dtypes
    for block in choosing.BLOCKS
]


def skip_without(platform):
    if jax.__version_info__ < NEEDS[platform]:
        pytest.skip(f'the kernel for {platform} needs a newer JAX than {jax.__version__}')


@pytest.mark.parametrize(('block', 'dtype'), [((64, 128), 'float32'), ((128, 64), 'bfloat16')])
def test_kernels_for_tpus_on_a_simulated_one(block, dtype):
    skip_without('tpu')
    from jax.experimental.pallas import tpu as pltpu

    from jaxpruner.sparse.operators.block_kernels.tpu import TpuKernels

    # Three tiles of rows, and padding in both directions; what was never written is not a number.
    given = case(40, 3 * block[0] - 1, 2 * block[1] - 1, block, 2, dtype)
    simulated = jax.__version_info__ >= (0, 8)
    interpret = pltpu.InterpretParams(uninitialized_memory='nan') if simulated else True
    kernels = TpuKernels(interpret=interpret, largest_tile=16)
    found = jax.jit(in_kernels(kernels))(given)
    for one, expected in zip(found, jax.jit(without_kernels)(given), strict=True):
        assert_close(one, expected, 2e-5 if dtype == 'float32' else 0.02)


@pytest.mark.parametrize(('platform', 'dtype', 'block'), LOWERED)
def test_kernels_are_lowered_without_a_device(platform, dtype, block):
    skip_without(platform)
    lowered_for, call = LOWERED_FOR[platform]
    given = case(200, 3 * block[0], 2 * block[1], block, 2, dtype)
    kernels = choosing.kernels_for(platform)
    lowered = jax.jit(in_kernels(kernels)).trace(given).lower(lowering_platforms=(lowered_for,))
    assert lowered.as_text().count(f'@{call}') == 3


@pytest.mark.parametrize(
    ('precision', 'is_highest'), [('default', False), ('high', True), ('highest', True)]
)
def test_kernels_for_tpus_have_the_default_precision(precision, is_highest):
    skip_without('tpu')
    given = case(20, 192, 256, (64, 128), 2)
    with jax.default_matmul_precision(precision):
        kernels = choosing.kernels_for('tpu')
    traced = jax.jit(in_kernels(kernels)).trace(given)
    assert str(traced.jaxpr).count('Precision.HIGHEST') == (6 if is_highest else 0)
    assert '@tpu_custom_call' in traced.lower(lowering_platforms=('tpu',)).as_text()


def test_kernels_of_the_default_device():
    missing = choosing.why_missing(jnp.bfloat16, (128, 64), stored=4)
    if missing:
        pytest.skip(missing)
    given = case(300, 500, 100, (128, 64), 2, 'bfloat16')
    found = jax.jit(in_kernels(None))(given)
    for one, expected in zip(found, jax.jit(without_kernels)(given), strict=True):
        assert_close(one, expected, 0.02)
