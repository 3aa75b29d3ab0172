"""Where there is no kernel, a sentence names what stands against it."""

import re
import types

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.sparse.operators.block_kernels import choosing, product
from sparse.operators.block_kernels.cases import case

TPU = types.SimpleNamespace(platform='tpu', device_kind='TPU v5 lite')
HOPPER = types.SimpleNamespace(platform='gpu', device_kind='NVIDIA H100', compute_capability='9.0')
BLACKWELL = types.SimpleNamespace(
    platform='gpu', device_kind='NVIDIA B200', compute_capability='10.0'
)
AMD = types.SimpleNamespace(platform='gpu', device_kind='AMD', compute_capability='gfx942')
OLD_TPU = types.SimpleNamespace(platform='tpu', device_kind='TPU v3')
CPU = jax.devices('cpu')[0]
NEWEST = (1, 0, 0)

HAS_ONE = [
    (TPU, 'bfloat16', (64, 128), (0, 6, 2)),
    (TPU, 'float32', (128, 128), NEWEST),
    (HOPPER, 'bfloat16', (64, 64), (0, 10, 0)),
    (HOPPER, 'float16', (128, 64), NEWEST),
]
HAS_NONE = [
    (CPU, 'float32', (64, 64), 1, NEWEST, 'not for cpu'),
    (TPU, 'float32', (64, 64), 1, (0, 5, 0), r'tpu needs JAX 0\.6\.2'),
    (HOPPER, 'bfloat16', (64, 64), 1, (0, 9, 2), r'gpu needs JAX 0\.10\.0'),
    (OLD_TPU, 'bfloat16', (64, 64), 1, NEWEST, 'TPU v3'),
    (BLACKWELL, 'bfloat16', (64, 64), 1, NEWEST, 'B200 has compute capability 10.0'),
    (AMD, 'bfloat16', (64, 64), 1, NEWEST, 'gfx942'),
    (HOPPER, 'float32', (64, 64), 1, NEWEST, 'float32; cast rows and values to bfloat16'),
    (TPU, 'float16', (64, 64), 1, NEWEST, 'bfloat16 and float32, and not float16'),
    (TPU, 'float32', (8, 128), 1, NEWEST, '8 x 128'),
    (HOPPER, 'bfloat16', (64, 256), 1, NEWEST, '64 x 256'),
    (TPU, 'bfloat16', (64, 64), 65537, NEWEST, '65537'),
]


@pytest.mark.parametrize(('device', 'dtype', 'block', 'version'), HAS_ONE)
def test_there_is_a_kernel(device, dtype, block, version, monkeypatch):
    monkeypatch.setattr(jax, '__version_info__', version)
    assert choosing.why_missing(jnp.dtype(dtype), block, stored=65536, device=device) is None


@pytest.mark.parametrize(('device', 'dtype', 'block', 'stored', 'version', 'reason'), HAS_NONE)
def test_there_is_no_kernel(device, dtype, block, stored, version, reason, monkeypatch):
    monkeypatch.setattr(jax, '__version_info__', version)
    missing = choosing.why_missing(dtype, block, stored=stored, device=device)
    assert missing
    assert re.search(reason, missing)


@pytest.mark.parametrize('device', [CPU, 'cpu'], ids=type)
def test_a_product_says_why_it_has_no_kernel(device):
    given = case(2, 64, 64, (64, 64), 1)
    with (
        jax.default_device(device),
        pytest.raises(NotImplementedError, match='Hopper GPUs, and not for cpu'),
    ):
        product.multiply(given.rows, given.values, given.indices, outputs=64)


def test_another_platform_gets_no_kernels():
    with pytest.raises(NotImplementedError, match='Hopper GPUs, and not for cpu'):
        choosing.kernels_for('cpu')
