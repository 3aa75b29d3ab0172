"""Parameters of any layout as weight matrices, and back."""

import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """Which axes of a parameter are the inputs and which the outputs of its weight matrices.

    Attributes:
      shape: the parameter's.
      contract: axes that are summed over, in the order in which inputs are to be counted: for a convolution's kernel
        height, width and channels, so that N:M groups lie along the channels.
      free: axes of the outputs, in the order in which these are to be counted.
      leading: axes over which there are matrices of their own: layers of a scan, experts.
      groups: into how many matrices the outputs are divided, as those of a grouped convolution.

    Raises:
      ValueError: an axis stands in none of the three or in more than one, or the groups do not divide the outputs.

    >>> MatrixLayout((3, 3, 8, 16), contract=(0, 1, 2), free=(3,)).matrices_shape
    (72, 16)
    >>> MatrixLayout((3, 3, 1, 16), contract=(0, 1, 2), free=(3,), groups=16).matrices_shape
    (16, 9, 1)
    """

    shape: tuple[int, ...]
    contract: tuple[int, ...]
    free: tuple[int, ...]
    leading: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self):
        axes = (*self.leading, *self.contract, *self.free)
        if sorted(axes) != list(range(len(self.shape))):
            raise ValueError(
                f'each axis of shape {self.shape} must be in one of contract={self.contract}, free={self.free} and '
                f'leading={self.leading}'
            )
        outputs = self._length(self.free)
        if self.groups < 1 or outputs % self.groups:
            raise ValueError(f'{self.groups} groups do not divide the {outputs} outputs')

    @property
    def matrices_shape(self) -> tuple[int, ...]:
        """`[..., inputs, outputs]`; where there are groups, they are the axis before the inputs."""
        groups = (self.groups,) if self.groups > 1 else ()
        inputs = self._length(self.contract)
        outputs = self._length(self.free) // self.groups
        leading = [self.shape[axis] for axis in self.leading]
        return (*leading, *groups, inputs, outputs)

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """Makes weight matrices `[..., inputs, outputs]` of a parameter of the layout's shape.

        >>> import jax.numpy as jnp
        >>> kernel = jnp.arange(4.0).reshape(2, 2)  # outputs first
        >>> MatrixLayout((2, 2), contract=(1,), free=(0,)).to_matrices(kernel).tolist()
        [[0.0, 2.0], [1.0, 3.0]]
        """
        *leading, inputs, outputs = self.matrices_shape
        arranged = leaf.transpose(self.leading + self.contract + self.free)
        if self.groups == 1:
            return arranged.reshape(self.matrices_shape)
        grouped = arranged.reshape(*leading[:-1], inputs, self.groups, outputs)
        return grouped.swapaxes(-3, -2)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """Makes the parameter (or mask, or scores) whose matrices `to_matrices` gives.

        >>> import jax.numpy as jnp
        >>> MatrixLayout((2, 1), contract=(1,), free=(0,)).from_matrices(jnp.ones((1, 2))).shape
        (2, 1)
        """
        order = self.leading + self.contract + self.free
        arranged = matrices.swapaxes(-3, -2) if self.groups > 1 else matrices
        arranged = arranged.reshape([self.shape[axis] for axis in order])
        positions = [order.index(axis) for axis in range(len(order))]
        return arranged.transpose(positions)

    def _length(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[axis] for axis in axes)
