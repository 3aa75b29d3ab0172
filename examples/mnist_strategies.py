"""Trains a CNN whose weights are pruned by a strategy and whose activations are pruned in the model.

    python examples/mnist_strategies.py                       # scikit-learn's digits, half of everything, seconds
    python examples/mnist_strategies.py --strategy example-3  # 2:4 after a third of the epochs, 1:4 after two thirds
    python examples/mnist_strategies.py --strategy mine.toml --data-dir folder --epochs 5   # MNIST, minutes

A file holds a table for each epoch that prunes, such as

    [3]
    method = "unstr_local"
    prune_rate_pattern = { Dense_0-kernel = 0.9, Dense_1-kernel = 0.8 }

Prints a line for each epoch, after which parameters and masks are saved: the same command goes on from there.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax.training.train_state import TrainState

import jaxpruner
from jaxpruner.activations import prune_act_struct, prune_act_unstruct
from jaxpruner.jax_pruning import (
    PruningStrategy,
    gradual_strategy,
    initial_masks,
    pruning,
    pruning_apply,
)
from mnist_strategies_data import Dataset, load_dataset

EVALUATION_BATCH = 500


@dataclasses.dataclass(frozen=True)
class Settings:
    """Trains a CNN with pruned weights and activations."""

    strategy: str = 'half'
    """Path of a TOML or JSON file, or one of half, dense, gradual, example-1, example-2, example-3, example-4."""
    epochs: int = 30
    """Passes over the training images."""
    batch_size: int = 64
    """Images per step."""
    learning_rate: float = 0.1
    """Of SGD with momentum 0.9."""
    activation_density: float = 0.5
    """Share of the activations of each image kept after the first convolution."""
    activation_pattern: str = '2:4'
    """N:M, kept of consecutive channels after the second convolution."""
    masks_every_step: bool = False
    """Apply masks after every step, not only after an epoch; otherwise pruned weights move in between."""
    seed: int = 0
    """Of weights and batches."""
    data_dir: Path | None = None
    """Folder with mnist.npz; none: scikit-learn's digits."""
    out: Path = Path('out/mnist_strategies')
    """Folder for the state after each epoch; another one for other settings."""


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


def read_strategy(name: str, epochs: int) -> PruningStrategy:
    """Returns a strategy from a file or by its name; the document's, which prune at epochs 10 and 20 of 30, scaled."""
    first = max(1, epochs // 3)
    second = max(first + 1, 2 * epochs // 3)
    layers = {'Dense_0-kernel': 0.9, 'Dense_1-kernel': 0.8}
    strategies = {
        'half': {first: {'method': 'unstr_unified_local', 'prune_rate_pattern': 0.5}},
        'dense': {},
        'gradual': gradual_strategy(range(1, first + 1), 0.1),
        'example-1': {1: {'method': 'unstr_global', 'prune_rate_pattern': 0.9}},
        'example-2': {first: {'method': 'str_unified_local', 'prune_rate_pattern': (2, 4)}},
        'example-3': {
            first: {'method': 'str_unified_local', 'prune_rate_pattern': (2, 4)},
            second: {'method': 'str_unified_local', 'prune_rate_pattern': (1, 4)},
        },
        'example-4': {first: {'method': 'unstr_unified_local', 'prune_rate_pattern': layers}},
    }
    if name not in strategies and not Path(name).is_file():
        raise ValueError(
            f'--strategy {name!r} is no file and no name; choose from {", ".join(strategies)}'
        )
    return PruningStrategy.parse(strategies.get(name, name))


@jax.jit
def apply_model(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    """Returns the gradients, and the number of images that are classified rightly."""

    def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({'params': params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    grads, logits = jax.grad(loss_of, has_aux=True)(state.params)
    return grads, (logits.argmax(axis=-1) == labels).sum()


@jax.jit
def update_model(state: TrainState, grads: Any, mask_key: Any) -> TrainState:
    """Returns the state after a step, with weights pruned where `mask_key` is not `None`."""
    return pruning_apply(state.apply_gradients(grads=grads), mask_key)[0]


def train_epoch(
    state: TrainState, images: Dataset, batch_size: int, rng: jax.Array, mask_key: Any = None
) -> TrainState:
    """Trains on every image once, in random order, but for those that fill no batch."""
    order = np.asarray(jax.random.permutation(rng, len(images.x_train)))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        batch = order[start : start + batch_size]
        grads, _ = apply_model(state, images.x_train[batch], images.y_train[batch])
        state = update_model(state, grads, mask_key)
    return state


def accuracy_of(state: TrainState, images: Dataset) -> float:
    """Returns the share of test images that are classified rightly."""
    right = 0
    for start in range(0, len(images.x_test), EVALUATION_BATCH):
        part = slice(start, start + EVALUATION_BATCH)
        right += int(apply_model(state, images.x_test[part], images.y_test[part])[1])
    return right / len(images.x_test)


def train(settings: Settings, strategy: PruningStrategy) -> TrainState:
    """Trains, prunes, prints and saves, epoch by epoch, from the start or from what was saved."""
    images = load_dataset(settings.data_dir)
    rng, init_rng = jax.random.split(jax.random.key(settings.seed))
    model = CNN(settings.activation_density, settings.activation_pattern)
    params = model.init(init_rng, images.x_train[:1])['params']
    tx = optax.sgd(settings.learning_rate, 0.9)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    # Masks of ones instead of None, so that a saved state has one structure at all epochs.
    mask_key = initial_masks(state, strategy)
    with ocp.CheckpointManager(settings.out.absolute()) as manager:
        done = manager.latest_step() or 0
        if done:
            args = ocp.args.StandardRestore({'state': state, 'masks': mask_key})
            restored = manager.restore(done, args=args)
            state, mask_key = restored['state'], restored['masks']
            print(f'Continuing: {done} of {settings.epochs} epochs are in {settings.out} already.')
        for epoch in range(1, settings.epochs + 1):
            rng, input_rng = jax.random.split(rng)
            if epoch <= done:
                continue
            in_steps = mask_key if settings.masks_every_step else None
            state = train_epoch(state, images, settings.batch_size, input_rng, in_steps)
            state, mask_key = pruning_apply(state, mask_key)
            updated, mask_key = pruning(state, epoch, mask_key=mask_key, prune_strategy=strategy)
            if updated:
                state, mask_key = pruning_apply(state, mask_key)
            manager.save(epoch, args=ocp.args.StandardSave({'state': state, 'masks': mask_key}))
            words = ', new masks' if updated else ''
            print(f'epoch {epoch:2}: accuracy {accuracy_of(state, images):.2%}{words}', flush=True)
    kernels = {layer: leaves['kernel'] for layer, leaves in state.params.items()}
    sparsities = jaxpruner.summarize_sparsity(kernels)
    layers = ', '.join(f'{layer} {1 - sparsities[layer]:.3f}' for layer in kernels)
    print(
        f'{settings.strategy}: test accuracy {accuracy_of(state, images):.2%}, '
        f'density {1 - sparsities["_total_sparsity"]:.3f} ({layers})'
    )
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example with the arguments of a command line; returns the exit status."""
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    began = time.perf_counter()
    try:
        train(settings, read_strategy(settings.strategy, settings.epochs))
    except (ValueError, TypeError, OSError) as error:
        print(f'mnist_strategies.py: {error}', file=sys.stderr)
        return 2
    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    print(f'{minutes}:{seconds:02d} min')
    return 0


if __name__ == '__main__':
    sys.exit(main())
