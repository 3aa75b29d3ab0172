"""What the tables of models share: shapes, and a short form of uses.

`'dot 0>1'` is a contraction of axis 0 with axis 1 free; `|2` names batch axes, `@0` stacked ones, and `~` says that the
operand is computed from the leaf.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree

KEY = jax.random.key(0)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def conv(x, w, numbers=('NHWC', 'HWIO', 'NHWC'), **options):
    return lax.conv_general_dilated(
        x, w, **{'window_strides': (1, 1), 'padding': 'SAME', **options}, dimension_numbers=numbers
    )


def scan(body, first, *args, **options):
    """Layers one after another, with nothing but the carry."""
    return lax.scan(lambda carried, taken: (body(carried, taken), None), first, *args, **options)[0]


def shard_map(function, axes, **specs):
    """`jax.shard_map` over some axes of a mesh of 2 x 4 devices that need not be there; others are the compiler's."""
    if not hasattr(jax, 'shard_map'):  # JAX 0.5
        from jax.experimental.shard_map import shard_map

        mesh = jax.sharding.AbstractMesh((('data', 2), ('model', 4)))
        automatic = frozenset(mesh.axis_names) - axes
        return shard_map(function, mesh, auto=automatic, check_rep=False, **specs)
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 4), ('data', 'model'), axis_types=types)
    return jax.shard_map(function, mesh=mesh, axis_names=axes, **specs)


def short(use) -> str:
    axes = [''.join(map(str, axes)) for axes in (use.contract, use.free, use.batch, use.stack)]
    text = f'{"" if use.exact else "~"}{use.op} {axes[0]}>{axes[1]}'
    return text + (f'|{axes[2]}' if axes[2] else '') + (f'@{axes[3]}' if axes[3] else '')


def short_uses(graph) -> dict[str, str]:
    return {
        tree.path_string(path): ', '.join(sorted({short(use) for use in uses}))
        for path, uses in graph.items()
    }
