"""Whether there is a kernel for a product with stored blocks, and why not."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.sparse.operators.block_kernels.steps import Kernels

BLOCKS = ((64, 64), (64, 128), (128, 64), (128, 128))  # inputs and outputs
# By the platform of a device.
DTYPES = {'tpu': ('bfloat16', 'float32'), 'gpu': ('bfloat16', 'float16')}
_OLDEST_JAX = {'tpu': (0, 6, 2), 'gpu': (0, 10, 0)}
# TPUs of these generations have no matrix unit that takes 16-bit blocks as they are.
_OLD_TPUS = ('TPU v2', 'TPU v3')
# A TPU has 1 MiB of memory for scalars, and a block takes three numbers of 32 bits.
_MOST_BLOCKS_OF_TPU = 2**16
_HOPPER = '9.'


def why_missing(
    dtype: Any,
    block: tuple[int, int],
    *,
    stored: int = 1,
    device: Any = None,
) -> str | None:
    """Why there is no kernel for a product with stored blocks; `None` if there is one.

    Args:
      dtype: of rows and values.
      block: how many inputs and outputs it has.
      stored: how many blocks the matrix has; under `vmap` those of all matrices.
      device: where the product is to run; by default the default device.

    >>> why_missing(jnp.float32, (128, 128), device=jax.devices('cpu')[0])
    'there are kernels for TPUs and Hopper GPUs, and not for cpu; use the product without a kernel'
    """
    device = device or _default_device()
    platform = device.platform
    if platform not in DTYPES:
        return _why_not_this_platform(platform)
    oldest = _OLDEST_JAX[platform]
    if jax.__version_info__ < oldest:
        return (
            f'the kernel for {platform} needs JAX {".".join(map(str, oldest))} or newer, and this is '
            f'{jax.__version__}; upgrade jax and jaxlib'
        )
    return (
        _why_not_this_device(device)
        or _why_not_this_type(dtype, platform)
        or _why_not_these_blocks(block, stored, platform)
    )


def kernels_for(platform: str) -> Kernels:
    """The kernels for a platform. They are loaded only now, since Pallas takes a while to load and may be missing.

    Raises:
      NotImplementedError: there are none for this platform.
    """
    if platform == 'tpu':
        from jaxpruner.sparse.operators.block_kernels.tpu import TpuKernels

        return TpuKernels.as_configured()
    if platform != 'gpu':
        raise NotImplementedError(_why_not_this_platform(platform))
    from jaxpruner.sparse.operators.block_kernels.hopper import HopperKernels

    return HopperKernels()


def default_kernels(dtype: Any, block: tuple[int, int], stored: int) -> Kernels:
    """The kernels for the default device.

    Raises:
      NotImplementedError: there are none; the message says why.
    """
    missing = why_missing(dtype, block, stored=stored)
    if missing:
        raise NotImplementedError(missing)
    return kernels_for(_default_device().platform)


def _default_device() -> Any:
    config: Any = jax.config  # its names are made as JAX is loaded
    device = config.jax_default_device
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def _why_not_this_platform(platform: str) -> str:
    return f'there are kernels for TPUs and Hopper GPUs, and not for {platform}; use the product without a kernel'


def _why_not_this_device(device: Any) -> str | None:
    if device.platform == 'tpu':
        if device.device_kind in _OLD_TPUS:
            return f'the kernel needs a TPU v4 or newer, and this is a {device.device_kind}'
        return None
    capability = str(getattr(device, 'compute_capability', 'unknown'))
    if not capability.startswith(_HOPPER):
        return (
            'the kernel for GPUs is written for the tensor cores of Hopper (compute capability 9.0), and this '
            f'{device.device_kind} has compute capability {capability}'
        )
    return None


def _why_not_this_type(dtype: Any, platform: str) -> str | None:
    name = jnp.dtype(dtype).name
    names = DTYPES[platform]
    if name in names:
        return None
    return f'the kernel for {platform} takes {" and ".join(names)}, and not {name}; cast rows and values to {names[0]}'


def _why_not_these_blocks(block: tuple[int, int], stored: int, platform: str) -> str | None:
    if tuple(block) not in BLOCKS:
        return f'a kernel takes blocks of 64 or 128 inputs by 64 or 128 outputs, and not of {block[0]} x {block[1]}'
    if platform == 'tpu' and stored > _MOST_BLOCKS_OF_TPU:
        return f'the kernel for TPUs takes up to {_MOST_BLOCKS_OF_TPU} blocks, and not {stored}; use larger ones'
    return None
