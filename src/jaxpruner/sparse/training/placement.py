"""The devices on which the blocks of a model lie: groups of outputs are spread over an axis of a mesh."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpruner.sparse.training.layouts import Layout


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh over which groups are spread, and the axis; without a mesh arrays stay where they are.

    Raises:
      ValueError: an axis that the mesh does not have, or a mesh with explicit axes.
    """

    mesh: Mesh | None
    axis: str | None

    def __post_init__(self):
        if (self.mesh is None) != (self.axis is None):
            raise ValueError(
                f'mesh and mesh_axis belong together, got mesh={self.mesh} and mesh_axis={self.axis!r}'
            )
        if self.mesh is not None and self.axis not in self.mesh.shape:
            raise ValueError(
                f'mesh_axis={self.axis!r} is no axis of the mesh; it has {", ".join(map(repr, self.mesh.shape))}'
            )
        self._check_axis_types()

    def _check_axis_types(self) -> None:
        """Refuses explicit axes: with blocks, the compiler decides how arrays are divided."""
        types = getattr(self.mesh, 'axis_types', None)  # the oldest JAX has none
        names = [getattr(axis_type, 'name', '') for axis_type in types or ()]
        if 'Explicit' in names:
            raise ValueError(
                f'mesh has axes of types ({", ".join(names)}), and blocks are spread over those of type Auto only; '
                'give the same devices as jax.sharding.Mesh(mesh.devices, mesh.axis_names)'
            )

    def shards_of(self, layout: Layout) -> int:
        """Over how many devices the groups of a leaf are spread: 1 if the devices cannot share them equally."""
        if self.mesh is None:
            return 1
        devices = self.mesh.shape[self.axis]
        return devices if layout.groups % devices == 0 else 1

    def is_replicated(self, layout: Layout) -> bool:
        """Whether a leaf lies on each device as a whole, although it should be spread."""
        if self.mesh is None:
            return False
        was_to_be_spread = self.mesh.shape[self.axis] > 1
        is_spread = self.shards_of(layout) > 1
        return was_to_be_spread and not is_spread

    def place_groups(self, array: jax.Array, layout: Layout) -> jax.Array:
        """Spreads an array `[*layers, groups, …]`, or puts it on all devices."""
        if self.shards_of(layout) == 1:
            return self.replicate(array)
        undivided = [None] * len(layout.layers)
        spec = PartitionSpec(*undivided, self.axis)
        return self._put(array, spec)

    def replicate(self, tree: Any) -> Any:
        """Puts arrays on all devices."""
        whole = PartitionSpec()
        return jax.tree.map(lambda array: self._put(array, whole), tree)

    def _put(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self.mesh is None:
            return array
        return jax.device_put(array, NamedSharding(self.mesh, spec))
