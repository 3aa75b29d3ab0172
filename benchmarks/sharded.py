"""Masks of a leaf that is sharded over 4 x 2 devices: what the devices tell one another, and how long it takes."""

import math
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.compiled import collectives
from benchmarks.report import Row
from benchmarks.selection import SPARSITY
from benchmarks.timing import bound, interleaved, ratio
from jaxpruner import mask_calculator

SHAPES = {'small': (64, 32), 'cpu': (1024, 512), 'gpu': (1024, 512)}
MESH = {'rows': 4, 'columns': 2}
DEVICES = math.prod(MESH.values())
LAYOUTS = {
    'rows and columns': PartitionSpec('rows', 'columns'),
    'rows': PartitionSpec('rows', None),
    'columns': PartitionSpec(None, 'columns'),
    'rows over both axes of the mesh': PartitionSpec(('rows', 'columns'), None),
}
ROUNDS = 30
COLUMNS = (
    'elements in the largest collective',
    'longest axis',
    'collectives in a pass',
    'milliseconds',
    'times a single device',
)


def environment() -> Mapping[str, str]:
    """What a process needs to have enough devices, if this one has not: those of the host, told apart."""
    if jax.device_count() >= DEVICES:
        return {}
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={DEVICES}'
    return {'XLA_FLAGS': flags.strip(), 'JAX_PLATFORMS': 'cpu'}


def run(size: str, rounds: int) -> list[Row]:
    """Times the mask for each way to cut the leaf."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(tuple(MESH.values())), tuple(MESH))
    x = jax.random.normal(jax.random.key(0), SHAPES[size])
    return [_row(x, name, NamedSharding(mesh, spec), rounds) for name, spec in LAYOUTS.items()]


def _row(x: jax.Array, name: str, sharding: NamedSharding, rounds: int) -> Row:
    sharded = jax.device_put(x, sharding)
    told = collectives(jax.jit(_mask).lower(sharded).compile().as_text())
    times = interleaved({'sharded': bound(_mask, sharded), 'single': bound(_mask, x)}, rounds)
    return Row(
        f'{list(x.shape)}, sharded: {name}',
        (
            told.largest,
            max(x.shape),
            told.in_a_turn,
            times['sharded'].milliseconds,
            ratio(times['sharded'], times['single']),
        ),
    )


def _mask(x: jax.Array) -> jax.Array:
    return mask_calculator.topk_mask_calculator(jnp.abs(x), SPARSITY)
