"""What classifiers are measured by."""

from collections.abc import Callable
from typing import Any

import jax
import optax

_LARGEST_BATCH = 500


def classification_metrics(
    model: Callable[[jax.Array], jax.Array], inputs: Any, labels: Any
) -> dict[str, jax.Array]:
    """Accuracy and cross-entropy over a test set, in batches of one size."""
    size = max(size for size in range(1, _LARGEST_BATCH + 1) if len(labels) % size == 0)
    batches = jax.tree.map(
        lambda array: array.reshape(-1, size, *array.shape[1:]), (inputs, labels)
    )
    found = jax.lax.map(lambda batch: example_metrics(model(batch[0]), batch[1]), batches)
    return {name: values.mean() for name, values in found.items()}


def example_metrics(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """The same of each example."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return {'accuracy': (logits.argmax(axis=-1) == labels).astype(losses.dtype), 'loss': losses}
