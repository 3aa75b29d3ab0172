"""The network of DQN in flax nnx: convolutions without padding and one dense layer, of MinAtar's sizes or Nature's."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpruner.baselines.convolutions import fastest_convolution

NATURE = (
    (32, 8, 4),
    (64, 4, 2),
    (64, 3, 1),
)  # Mnih et al. 2015, with 512 hidden units; images of 84 x 84 x 4


class QNetwork(nnx.Module):
    """From what is observed to the value of each action."""

    def __init__(
        self,
        shape: Sequence[int],
        convolutions: Sequence[Sequence[int]],
        hidden: int,
        actions: int,
        dtype: jax.typing.DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        height, width, channels = shape
        self.layers = len(convolutions)
        # With strides XLA's own is the faster, on a CPU, too.
        is_strided = any(stride > 1 for _, _, stride in convolutions)
        convolve = jax.lax.conv_general_dilated if is_strided else fastest_convolution()
        convolution = functools.partial(
            nnx.Conv, padding='VALID', dtype=dtype, conv_general_dilated=convolve, rngs=rngs
        )
        for number, (filters, size, stride) in enumerate(convolutions):
            setattr(self, f'conv{number + 1}', convolution(channels, filters, (size, size), stride))
            height, width, channels = (
                (height - size) // stride + 1,
                (width - size) // stride + 1,
                filters,
            )
        self.dense = nnx.Linear(
            math.prod((height, width, channels)), hidden, dtype=dtype, rngs=rngs
        )
        self.head = nnx.Linear(hidden, actions, dtype=dtype, rngs=rngs)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """Values actions."""
        features = observations.astype(self.dtype)
        if observations.dtype == jnp.uint8:
            features = features / 255
        for number in range(self.layers):
            features = nnx.relu(getattr(self, f'conv{number + 1}')(features))
        features = nnx.relu(self.dense(features.reshape(len(features), -1)))
        return self.head(features).astype(jnp.float32)
