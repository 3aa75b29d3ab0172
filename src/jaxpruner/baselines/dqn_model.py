"""The network of DQN in flax nnx: convolutions without padding and one dense layer."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpruner.baselines.convolutions import fastest_convolution


class Convolution(NamedTuple):
    """A layer of the network."""

    filters: int
    size: int  # pixels of a side
    stride: int


# Mnih et al. 2015, for images of 84 x 84 x 4; with 512 hidden units.
NATURE = (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1))


class QNetwork(nnx.Module):
    """From observations to the value of each action.

    `shape` is height, width and channels.
    """

    def __init__(
        self,
        shape: Sequence[int],
        convolutions: Sequence[Convolution],
        hidden: int,
        actions: int,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        height, width, channels = shape
        self.layers = len(convolutions)
        # With strides XLA's own convolution is the faster, on a CPU, too.
        is_strided = any(settings.stride > 1 for settings in convolutions)
        convolve = jax.lax.conv_general_dilated if is_strided else fastest_convolution()
        convolution = functools.partial(
            nnx.Conv, padding='VALID', dtype=dtype, conv_general_dilated=convolve, rngs=rngs
        )
        for number, (filters, size, stride) in enumerate(convolutions):
            layer = convolution(channels, filters, (size, size), stride)
            setattr(self, f'conv{number + 1}', layer)
            height = (height - size) // stride + 1
            width = (width - size) // stride + 1
            channels = filters
        features = height * width * channels
        self.dense = nnx.Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, actions, dtype=dtype, rngs=rngs)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """The values, float32[batch, actions]; uint8 observations are brightness, over 255."""
        features = observations.astype(self.dtype)
        if observations.dtype == jnp.uint8:
            features = features / 255
        for number in range(self.layers):
            layer = getattr(self, f'conv{number + 1}')
            features = nnx.relu(layer(features))
        features = features.reshape(len(features), -1)
        features = nnx.relu(self.dense(features))
        return self.head(features).astype(jnp.float32)
