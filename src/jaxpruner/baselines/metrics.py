"""What classifiers are measured by."""

from collections.abc import Callable
from typing import Any

import jax
import optax

_LARGEST_BATCH = 500


def classification_metrics(model: Callable[[jax.Array], jax.Array], inputs: Any, labels: Any) -> dict[str, jax.Array]:
    """Accuracy and cross-entropy over a test set, in batches of one size.

    Args:
      model: from a batch of inputs to logits.
      inputs: [tests, …].
      labels: int32[tests].

    Returns:
      `accuracy` in [0, 1] and `loss` in nats, float32 scalars.

    >>> import jax.numpy as jnp
    >>> found = classification_metrics(lambda x: 9 * x, jnp.eye(2), jnp.array([0, 0]))
    >>> float(found['accuracy'])
    0.5
    """

    def of_batch(batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = model(batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return logits.argmax(axis=-1) == batch[1], losses

    size = max(size for size in range(1, _LARGEST_BATCH + 1) if len(labels) % size == 0)
    batches = jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), (inputs, labels))
    right, losses = jax.lax.map(of_batch, batches)
    return {'accuracy': right.mean(), 'loss': losses.mean()}
