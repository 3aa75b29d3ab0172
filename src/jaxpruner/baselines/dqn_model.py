"""The network of DQN in flax nnx: convolutions without padding and one dense layer."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpruner.baselines.convolutions import fastest_convolution

# Filters, size and stride of each convolution in Mnih et al. 2015, for images of 84 x 84 x 4; with
# 512 hidden units.
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class QNetwork(nnx.Module):
    """From observations to the value of each action.

    `shape` is height, width and channels; `convolutions` are as in `NATURE`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        convolutions: Sequence[Sequence[int]],
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
        is_strided = any(stride > 1 for _, _, stride in convolutions)
        convolve = jax.lax.conv_general_dilated if is_strided else fastest_convolution()
        convolution = functools.partial(
            nnx.Conv, padding='VALID', dtype=dtype, conv_general_dilated=convolve, rngs=rngs
        )
        for number, (filters, size, stride) in enumerate(convolutions):
            setattr(self, f'conv{number + 1}', convolution(channels, filters, (size, size), stride))
            height = (height - size) // stride + 1
            width = (width - size) // stride + 1
            channels = filters
        self.dense = nnx.Linear(height * width * channels, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, actions, dtype=dtype, rngs=rngs)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """The values, float32[batch, actions]; uint8 observations are brightness, over 255."""
        features = observations.astype(self.dtype)
        if observations.dtype == jnp.uint8:
            features = features / 255
        for number in range(self.layers):
            features = nnx.relu(getattr(self, f'conv{number + 1}')(features))
        features = nnx.relu(self.dense(features.reshape(len(features), -1)))
        return self.head(features).astype(jnp.float32)
