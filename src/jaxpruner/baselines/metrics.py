"""What classifiers are measured by."""

from collections.abc import Callable
from typing import Any

import jax
import optax

Metrics = dict[str, jax.Array]  # by name
_LARGEST_BATCH = 500


def classification_metrics(
    model: Callable[[jax.Array], jax.Array], inputs: Any, labels: Any
) -> Metrics:
    """Mean `accuracy` in [0, 1] and `loss` in nats over a test set, in batches of one size.

    `model` maps a batch of inputs to logits; `labels` are int32[tests].
    """
    size = _LARGEST_BATCH
    while len(labels) % size:
        size -= 1

    def in_batches(array):
        return array.reshape(-1, size, *array.shape[1:])

    def measure(batch):
        inputs, labels = batch
        return example_metrics(model(inputs), labels)

    batches = jax.tree.map(in_batches, (inputs, labels))
    metrics = jax.lax.map(measure, batches)
    return {name: values.mean() for name, values in metrics.items()}


def example_metrics(logits: jax.Array, labels: jax.Array) -> Metrics:
    """`accuracy`, which is 0 or 1, and `loss` in nats of each example, float32[n]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_right = logits.argmax(axis=-1) == labels
    return {'accuracy': is_right.astype(losses.dtype), 'loss': losses}
