"""Classifiers of digits for `train_block_sparse.py`: LeNet-300-100 and a network of width 1024."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mnist_strategies_data import Dataset
from train_block_sparse_methods import Run, block_model, block_run, dense_run, masked_run, rigl

BATCH_SIZE = 128
METHODS = ('dense', 'masks', 'blocks')
_LOW_RANK_SHARE = 0.75  # of the kept weights, at most


@dataclasses.dataclass(frozen=True)
class Network:
    """Hidden layers, and the blocks they are trained in.

    Attributes:
      widths: of the hidden layers.
      block: inputs and outputs.
      low_rank: rank of the term beside the blocks, at most; see `rank_for`.
      rates: method -> the first learning rate, which falls to zero as a cosine does. For masks and for blocks it is the
        best of 0.002, 0.004 and 0.01 on 10,000 held-out training images of MNIST, at 95 % and with another seed. Dense
        networks take that of masks.
    """

    widths: tuple[int, ...]
    block: tuple[int, int]
    low_rank: int
    rates: Mapping[str, float]

    def init(self, seed: int, inputs: int) -> dict[str, Any]:
        """He's initialisation."""
        sizes = (inputs, *self.widths, 10)
        params = {}
        for number, key in enumerate(jax.random.split(jax.random.key(seed), len(sizes) - 1)):
            shape = sizes[number : number + 2]
            kernel = jax.random.normal(key, shape) * np.sqrt(2 / shape[0])
            params[f'layer_{number}'] = {'kernel': kernel, 'bias': jnp.zeros(shape[1])}
        return params

    def rank_for(self, inputs: int, sparsity: float) -> int:
        """The largest rank, up to `low_rank`, whose term has no more than its share of each hidden layer."""
        sizes = (inputs, *self.widths)
        rank = self.low_rank
        for rows, columns in itertools.pairwise(sizes):
            rank = min(
                rank, int(_LOW_RANK_SHARE * (1 - sparsity) * rows * columns / (rows + columns))
            )
        return rank


NETWORKS = {
    'lenet': Network(
        (300, 100),
        block=(1, 5),
        low_rank=1,
        rates={'dense': 0.004, 'masks': 0.004, 'blocks': 0.01},
    ),
    'wide': Network(
        (1024, 1024),
        block=(1, 64),
        low_rank=4,
        rates={'dense': 0.002, 'masks': 0.002, 'blocks': 0.004},
    ),
}


def apply_fn(params: Any, images: jax.Array) -> jax.Array:
    """The logits float[batch, 10]."""
    *hidden, head = params.values()
    x = images
    for layer in hidden:
        x = jax.nn.relu(x @ layer['kernel'] + layer['bias'])
    return x @ head['kernel'] + head['bias']


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run of the comparison: what names its file."""

    network: str
    sparsity: float
    method: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Of the file of its result."""
        sparsity = '' if self.method == 'dense' else f'_{self.sparsity:g}'
        return f'{self.network}_{self.method}{sparsity}_{self.steps}_{self.seed}'


def train(data: Dataset, cell: Cell, show: Callable[..., None]) -> dict[str, Any]:
    """Trains a cell; returns its accuracy, seconds and weights."""
    train_images, test_images = _flat(data.x_train), _flat(data.x_test)
    network = NETWORKS[cell.network]
    params = network.init(cell.seed, train_images.shape[1])
    batch_size = min(BATCH_SIZE, len(train_images))
    run, weights = _run_of(cell, network, params, train_images[:batch_size])
    labels = jnp.asarray(data.y_train)
    rng = np.random.default_rng(cell.seed)
    for number in range(cell.steps):
        chosen = rng.integers(len(train_images), size=batch_size)
        run.advance(train_images[chosen], labels[chosen], number)
        show(cell.name, number + 1)
    predicted = np.argmax(run.outputs(test_images), -1)
    return {
        **dataclasses.asdict(cell),
        'data': data.name,
        'accuracy': float(np.mean(predicted == data.y_test)),
        'seconds': run.seconds,
        'weights': weights,
    }


def _flat(images: np.ndarray) -> jax.Array:
    return jnp.asarray(images.reshape(len(images), -1) - images.mean())


def _run_of(cell: Cell, network: Network, params: Any, sample: jax.Array) -> tuple[Run, int]:
    """The run, and how many weights it trains."""
    tx = optax.adam(optax.cosine_decay_schedule(network.rates[cell.method], cell.steps))
    if cell.method == 'dense':
        weights = sum(leaf.size for leaf in jax.tree.leaves(params))
        return dense_run(apply_fn, params, tx, cross_entropy), weights
    model = block_model(
        apply_fn,
        params,
        sample,
        cell.steps,
        sparsity=cell.sparsity,
        block=network.block,
        low_rank=network.rank_for(sample.shape[1], cell.sparsity),
        rng_seed=cell.seed,
    )
    if cell.method == 'masks':
        pruner = rigl(model, cell.steps, cell.seed)
        return masked_run(apply_fn, params, tx, cross_entropy, pruner), model.plan.kept
    return block_run(model, params, tx, cross_entropy), model.plan.kept
