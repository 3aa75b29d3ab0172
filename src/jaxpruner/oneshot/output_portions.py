"""Masks of some outputs at a time, so that matrices with the same number of inputs share a program."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from jaxpruner import tree as tree_lib

_OUTPUTS = 256  # of a portion


def in_portions(mask_of: Callable[[jax.Array], jax.Array], weights: jax.Array) -> jax.Array:
    """Makes the mask `mask_of(weights)` of matrices `[..., inputs, outputs]`, each output of which is masked by itself.

    What `mask_of` selects with takes most of the time to compile. It is called with the same shape for matrices of any
    number of outputs.
    """
    outputs = weights.shape[-1]
    # On several devices a portion may lie on some of them alone.
    is_divided = jax.device_count() > 1
    if outputs <= _OUTPUTS or tree_lib.has_traced(weights) or is_divided:
        return mask_of(weights)
    mask = jax.device_put(np.zeros(weights.shape, np.uint8))  # takes no program
    for start in range(0, outputs, _OUTPUTS):
        start = min(start, outputs - _OUTPUTS)  # the last portion has some outputs once more
        portion = _take(weights, start)
        mask = _put(mask, mask_of(portion), start)
    return mask


@jax.jit
def _take(weights: jax.Array, start: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(weights, start, _OUTPUTS, -1)


@functools.partial(jax.jit, donate_argnums=0)
def _put(mask: jax.Array, portion: jax.Array, start: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(mask, portion, start, -1)
