# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # RigL with Flax NNX, from an empty file to a plot
#
# RigL trains a network that is sparse from the first step to the last. Every few steps the smallest weights are
# dropped, and as many are grown where the gradient is largest. Here it trains at 90 %, beside a mask that never
# moves. The first cell installs what is missing.

# %%
import dataclasses
import importlib.util
import subprocess
import sys
from typing import NamedTuple

NEEDED = ('jaxpruner', 'flax', 'matplotlib', 'sklearn')
if not all(importlib.util.find_spec(name) for name in NEEDED):
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--find-links', '.']
    subprocess.run([*install, 'jaxpruner[flax,plot]', 'scikit-learn'], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxpruner
from jaxpruner import report

# %matplotlib inline

# %% [markdown]
# ## The data
#
# scikit-learn comes with 1797 images of 8x8 pixels.

# %%
images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    (images / 16).astype(np.float32), labels.astype(np.int32), test_size=0.25, random_state=0
)
print(f'{len(x_train)} images for training, {len(x_test)} for testing')

# %% [markdown]
# ## A network and its training
#
# The ordinary NNX loop, without pruning:


# %%
class Network(nnx.Module):
    """A hidden layer of 256 units, on pixels in a row."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model):
    return jnp.mean(model(x_test).argmax(axis=-1) == y_test)


STEPS, BATCH_SIZE = 400, 128


def batches():
    """The same batches for every training."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        chosen = rng.choice(len(x_train), BATCH_SIZE, replace=False)
        yield x_train[chosen], y_train[chosen]


# %% [markdown]
# The dense network is the baseline:

# %%
model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
for x, y in batches():
    train_step(model, optimizer, x, y)
dense_accuracy = float(accuracy(model))
print(f'dense: {dense_accuracy:.1%}')

# %% [markdown]
# ## RigL
#
# - `RigL` says **which** weights are dropped and grown; `drop_fraction_fn` how many in an update.
# - `sparsity=0.9` says **how many** are removed of each kernel. Biases stay dense.
# - The schedule says **when**: every 10 steps, but not in the last quarter.

# %%
LAST_UPDATE = 3 * STEPS // 4

pruner = jaxpruner.RigL(
    sparsity=0.9,
    scheduler=jaxpruner.PeriodicSchedule(
        update_freq=10, update_start_step=10, update_end_step=LAST_UPDATE
    ),
    drop_fraction_fn=optax.cosine_decay_schedule(0.3, LAST_UPDATE),
)

# %% [markdown]
# What will it do?

# %%
model = Network(nnx.Rngs(0))
plan = pruner.plan(nnx.state(model, nnx.Param))
print(plan)

# %% [markdown]
# Three lines differ from the dense training:
#
# 1. `wrap_optax` wraps the optimizer. Masks live in its state.
# 2. `post_gradient_update` sets to zero what RigL's first mask prunes.
# 3. `MaskHistory.record` stores what the masks do, for the plots below.


# %%
class Run(NamedTuple):
    """What a training leaves behind."""

    model: Network
    optimizer: nnx.Optimizer
    history: report.MaskHistory
    losses: list[jax.Array]
    connections_at_first: np.ndarray


def connections(model):
    """How many units of the hidden layer look at each pixel."""
    return np.count_nonzero(model.hidden.kernel[...], axis=1)


def train(pruner):
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, pruner.wrap_optax(optax.adam(3e-3)), wrt=nnx.Param)  # line 1
    weights = nnx.state(model, nnx.Param)
    nnx.update(model, pruner.post_gradient_update(weights, optimizer.opt_state))  # line 2
    run = Run(model, optimizer, report.MaskHistory(), [], connections(model))
    for x, y in batches():
        run.losses.append(train_step(model, optimizer, x, y))
        run.history.record(optimizer.opt_state)  # line 3
    return run


run = train(pruner)
rigl_accuracy = float(accuracy(run.model))
print(f'RigL at 90 %: {rigl_accuracy:.1%}, dense: {dense_accuracy:.1%}')
assert rigl_accuracy > dense_accuracy - 0.03

# %% [markdown]
# `sparsity_metrics` counts what masks prune; `_disagreement` is the share of pruned weights that are not zero.

# %%
opt_state = run.optimizer.opt_state
metrics = jaxpruner.sparsity_metrics(opt_state, nnx.state(run.model, nnx.Param))
for name in ('hidden/kernel', 'head/kernel'):
    print(f'{name:14} {metrics[name]:.1%} pruned')
    assert abs(metrics[name] - 0.9) < 1e-3
assert metrics['_disagreement'] == 0
assert opt_state.masks['hidden']['kernel'][...].shape == (64, 256)  # the mask itself

# %% [markdown]
# ## What the masks did
#
# As many weights are grown as are dropped.

# %% mystnb={"image": {"alt": "Sparsity of the masks over the steps: 90 percent throughout"}}
report.plot_schedule(run.history)

# %%
counts = run.history.counts
assert (counts.kept == counts.kept[0]).all()

# %% [markdown]
# Pixels at the edges are dark in every image, and a weight that looks at one has no gradient. RigL moves many of these
# elsewhere. A row is a pixel, a column a unit.

# %% mystnb={"image": {"alt": "The mask of the hidden layer, 64 by 256: rows of pixels at the edges keep few weights"}}
report.plot_masks(opt_state, leaves='hidden/kernel')

# %% [markdown]
# How many units look at a pixel that is always dark, before training and after it?

# %%
is_dark = x_train.max(axis=0) == 0
before, after = run.connections_at_first[is_dark].mean(), connections(run.model)[is_dark].mean()
print(f'before training {before:.1f} units, after it {after:.1f}')
assert after < 0.85 * before

# %% [markdown]
# ## Does it pay to move the mask?
#
# `StaticRandomSparse` keeps its random mask. At 98 % it matters more where the weights are.

# %%
pruners = {
    'RigL': dataclasses.replace(pruner, sparsity=0.98),
    'a mask that never moves': jaxpruner.StaticRandomSparse(sparsity=0.98),
}
runs = {name: train(each) for name, each in pruners.items()}
accuracies = {name: float(accuracy(each.model)) for name, each in runs.items()}
for name, value in accuracies.items():
    print(f'{name:24} {value:.1%} of the test images')
assert accuracies['RigL'] > accuracies['a mask that never moves'] + 0.05

# %% mystnb={"image": {"alt": "Training loss at 98 percent: with RigL it falls below that of a mask that never moves"}}
figure, axes = plt.subplots(figsize=(6, 3), layout='constrained')
for name, each in runs.items():
    axes.plot(np.array(each.losses), label=name)
axes.set(xlabel='step', ylabel='loss', title='98 % of the weights are zero')
axes.legend()
plt.show()

# %% [markdown]
# One seed proves little: [Baselines](../baselines.md) has several.
#
# Next: [Plot the masks of a run](../how_to/plot_a_run.md), [Prune a Flax NNX model](../how_to/flax_nnx.md).
