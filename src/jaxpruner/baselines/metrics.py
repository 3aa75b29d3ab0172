"""What classifiers are measured by."""

from collections.abc import Callable
from typing import Any

import jax
import optax

_LARGEST_BATCH = 500


def classification_metrics(
    model: Callable[[jax.Array], jax.Array], inputs: Any, labels: Any
) -> dict[str, jax.Array]:
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
    size = max(size for size in range(1, _LARGEST_BATCH + 1) if len(labels) % size == 0)
    batches = jax.tree.map(
        lambda array: array.reshape(-1, size, *array.shape[1:]), (inputs, labels)
    )
    found = jax.lax.map(lambda batch: example_metrics(model(batch[0]), batch[1]), batches)
    return {name: values.mean() for name, values in found.items()}


def example_metrics(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """The same of each example.

    Args:
      logits: float32[n, classes].
      labels: int32[n].

    Returns:
      `accuracy`, which is 0 or 1, and `loss` in nats, float32[n].

    >>> import jax.numpy as jnp
    >>> example_metrics(jnp.eye(2), jnp.array([0, 0]))['accuracy'].tolist()
    [1.0, 0.0]
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return {'accuracy': (logits.argmax(axis=-1) == labels).astype(losses.dtype), 'loss': losses}
