"""`shard_map` over meshes without devices, in all versions of JAX."""

import jax


def abstract_mesh(**sizes):
    """A mesh of devices that need not be there. The compiler places what no `shard_map` does."""
    if not hasattr(jax.sharding, 'AxisType'):  # before JAX 0.6
        return jax.sharding.AbstractMesh(tuple(sizes.items()))
    automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)


def partly_manual(function, mesh, axes, **specs):
    """`shard_map` over some axes of a mesh; the others are left to the compiler."""
    if hasattr(jax, 'shard_map'):
        return jax.shard_map(function, mesh=mesh, axis_names=axes, **specs)
    from jax.experimental.shard_map import shard_map

    return shard_map(
        function, mesh, auto=frozenset(mesh.axis_names) - axes, check_rep=False, **specs
    )
