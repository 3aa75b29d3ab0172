"""The network of the clients in flax nnx: the convolutional one that FedJAX trains on EMNIST, of any size."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpruner.baselines.convolutions import fastest_convolution


class ClientCNN(nnx.Module):
    """Two 3x3 convolutions, a pooling, and two dense layers."""

    def __init__(
        self,
        side: int,
        filters: Sequence[int],
        hidden: int,
        classes: int,
        dropout: Sequence[float],
        dtype: jax.typing.DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dropout = tuple(dropout)
        fast = fastest_convolution()

        def convolution(inputs: int, outputs: int) -> nnx.Conv:
            return nnx.Conv(
                inputs,
                outputs,
                (3, 3),
                padding='VALID',
                dtype=dtype,
                conv_general_dilated=fast,
                rngs=rngs,
            )

        self.conv1, self.conv2 = convolution(1, filters[0]), convolution(filters[0], filters[1])
        pooled = (side - 4) // 2
        self.dense = nnx.Linear(pooled * pooled * filters[1], hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Classifies."""
        features = nnx.relu(self.conv2(nnx.relu(self.conv1(images))))
        features = nnx.max_pool(features, (2, 2), (2, 2)).reshape(len(images), -1)
        features = nnx.relu(self.dense(self._drop(0, features, key)))
        return self.head(self._drop(1, features, key)).astype(jnp.float32)

    def _drop(self, place: int, features: jax.Array, key: jax.Array | None) -> jax.Array:
        rate = self.dropout[place]
        if key is None or not rate:
            return features
        kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, features.shape)
        return jnp.where(kept, features / (1 - rate), 0.0)
