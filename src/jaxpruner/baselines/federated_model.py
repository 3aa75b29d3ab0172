"""The network of the clients in flax nnx: the one that FedJAX trains on EMNIST, of any size."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpruner.baselines.convolutions import fastest_convolution


class ClientCNN(nnx.Module):
    """Two 3x3 convolutions, a pooling, and two dense layers.

    `side` is the height and width of an image; the rates in `dropout` hold before each dense layer.
    """

    def __init__(
        self,
        side: int,
        filters: Sequence[int],
        hidden: int,
        classes: int,
        dropout: Sequence[float],
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dropout = tuple(dropout)
        convolve = fastest_convolution()
        convolution = functools.partial(
            nnx.Conv, padding='VALID', dtype=dtype, conv_general_dilated=convolve, rngs=rngs
        )
        self.conv1 = convolution(1, filters[0], (3, 3))
        self.conv2 = convolution(filters[0], filters[1], (3, 3))
        pooled_side = (side - 4) // 2
        features = pooled_side * pooled_side * filters[1]
        self.dense = nnx.Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits, float32[batch, classes]; without a key there is no dropout."""
        features = nnx.relu(self.conv1(images))
        features = nnx.relu(self.conv2(features))
        pooled = nnx.max_pool(features, (2, 2), (2, 2))
        features = pooled.reshape(len(images), -1)
        features = self._drop(0, features, key)
        features = nnx.relu(self.dense(features))
        features = self._drop(1, features, key)
        return self.head(features).astype(jnp.float32)

    def _drop(self, layer: int, features: jax.Array, key: jax.Array | None) -> jax.Array:
        rate = self.dropout[layer]
        if key is None or not rate:
            return features
        key = jax.random.fold_in(key, layer)
        is_kept = jax.random.bernoulli(key, 1 - rate, features.shape)
        return jnp.where(is_kept, features / (1 - rate), 0.0)
