"""The model and the training of the strategies example, with two of the four functions that prune in them."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from jaxpruner.activations import prune_act_struct, prune_act_unstruct
from jaxpruner.jax_pruning import pruning_apply
from mnist_strategies_data import Dataset

EVALUATION_BATCH = 500


class CNN(nn.Module):
    """A small CNN that prunes its activations: unstructured after the first convolution, N:M after the second."""

    density: float = 0.9
    sparsity_pattern: str | tuple[int, int] = (2, 4)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=32, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = prune_act_unstruct(x, self.density)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = prune_act_struct(x, self.sparsity_pattern)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        x = nn.Dense(features=256)(x)
        x = nn.relu(x)
        x = nn.Dense(features=10)(x)
        return x


def train_epoch(
    state: TrainState,
    dataset: Dataset,
    batch_size: int,
    rng: jax.Array,
    mask_key: Any = None,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[TrainState, float, float]:
    """Trains on every image once, in random order, but for those that fill no batch.

    Returns:
      The state, and the means over the batches of the loss and of the accuracy.
    """
    steps = len(dataset.x_train) // batch_size
    order = np.asarray(jax.random.permutation(rng, len(dataset.x_train)))
    metrics = []
    # A compiled step, no compiled loop of steps: on CPUs XLA runs convolutions in a loop on one core, ten times slower.
    for batch in order[: steps * batch_size].reshape(steps, batch_size):
        grads, *both = apply_model(state, dataset.x_train[batch], dataset.y_train[batch])
        state = update_model(state, grads, mask_key)
        metrics.append(both)
        on_step()
    loss, accuracy = np.mean(metrics, axis=0)
    return state, float(loss), float(accuracy)


@jax.jit
def apply_model(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the gradients, the loss and the accuracy of a batch."""

    def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({'params': params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return grads, loss, jnp.mean(logits.argmax(axis=-1) == labels)


@jax.jit
def update_model(state: TrainState, grads: Any, mask_key: Any) -> TrainState:
    """Returns the state after a step, with weights pruned where `mask_key` is not `None`."""
    state, _ = pruning_apply(state.apply_gradients(grads=grads), mask_key)
    return state


def evaluate(state: TrainState, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Returns the loss and the accuracy, in batches so that no more than one has to fit into memory."""
    sums = np.zeros(2)
    for at in range(0, len(images), EVALUATION_BATCH):
        part = slice(at, at + EVALUATION_BATCH)
        sums += np.asarray(_test_model(state, images[part], labels[part]))
    loss, accuracy = (sums / len(images)).tolist()
    return loss, accuracy


@jax.jit
def _test_model(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the losses and the number of images that are classified rightly."""
    logits = state.apply_fn({'params': state.params}, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), (logits.argmax(axis=-1) == labels).sum()
