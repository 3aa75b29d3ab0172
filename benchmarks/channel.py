"""Masks of whole channels, along the last axis and along the first."""

import functools

import jax
import jax.numpy as jnp

from benchmarks import groups
from benchmarks.report import Row
from jaxpruner.sparsity_types import Channel

AXES = (-1, 0)
ROUNDS = groups.ROUNDS
COLUMNS = groups.COLUMNS


def run(size: str, rounds: int) -> list[Row]:
    """Times both axes for matrices and for convolutions."""
    pairs = {
        f'channels along axis {axis}': (Channel(axis), functools.partial(by_sorting, axis=axis))
        for axis in AXES
    }
    return groups.rows(pairs, size, rounds)


def by_sorting(x: jax.Array, axis: int) -> jax.Array:
    """What one would write without the library."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mask = groups.keep_by_argsort(x.mean(others))
    return jnp.broadcast_to(jnp.expand_dims(mask, others), x.shape)
