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
# # MNIST pruning: at once, in patterns, in training
#
# LeNet-300-100 has 266,200 weights. This notebook removes them at once, in patterns, and in training.
#
# Set the environment variable `MNIST` to a folder that holds `mnist.npz`. Without one, the notebook
# uses the 8x8 digits of scikit-learn. The first cell installs what is missing.

# %%
import importlib.util
import subprocess
import sys

NEEDED = ('jaxpruner', 'flax', 'matplotlib', 'orbax', 'rich', 'sklearn', 'tensorboardX', 'tyro')
if not all(importlib.util.find_spec(name) for name in NEEDED):
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--find-links', '.']
    subprocess.run([*install, 'jaxpruner[baselines]'], check=True)

# %%
import functools
import itertools
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpruner
from jaxpruner.baselines import data

# %matplotlib inline

MNIST = os.environ.get('MNIST')  # the folder, or None
TRAINED_ON = 10_000  # of MNIST's 60,000 images: minutes become seconds
BATCH_SIZE = 100
STEPS = 400
HIDDEN = ('hidden1', 'hidden2')

# %%
images = data.load_mnist(MNIST) if MNIST else data.load_digits()
x_train, x_test = (x.reshape(len(x), -1) for x in (images.x_train[:TRAINED_ON], images.x_test))
y_train, y_test = images.y_train[:TRAINED_ON], images.y_test
SIDE = images.x_train.shape[1]
print(
    f'{"MNIST" if MNIST else "scikit-learn digits"}: {len(x_train):,} images of {SIDE}x{SIDE} for training, ',
    end='',
)
print(f'{len(x_test):,} for testing')

# %% [markdown]
# ## The network, and its dense training
#
# The kernels of the two hidden layers will be pruned. The biases and the head stay dense.


# %%
class LeNet(nn.Module):
    """LeNet-300-100: two hidden layers, on pixels in a row."""

    @nn.compact
    def __call__(self, x):
        layer = functools.partial(nn.Dense, kernel_init=nn.initializers.he_uniform())
        x = nn.relu(layer(300, name='hidden1')(x))
        x = nn.relu(layer(100, name='hidden2')(x))
        return layer(10, name='head')(x)


start = jax.jit(LeNet().init)(jax.random.key(0), x_train[:1])['params']


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(
        LeNet().apply({'params': params}, x), y
    ).mean()


@jax.jit
def accuracy(params):
    return jnp.mean(LeNet().apply({'params': params}, x_test).argmax(-1) == y_test)


def hidden_sparsity(params):
    """The share of zeros in the kernels of both hidden layers."""
    return jaxpruner.summarize_sparsity({layer: params[layer]['kernel'] for layer in HIDDEN})[
        '_total_sparsity'
    ]


# %% [markdown]
# Pruning adds the two marked lines. `pre_forward_update` and `post_gradient_update` matter only for algorithms that
# prune in the forward pass or start sparse.


# %%
def train(**config):
    """Returns the trained parameters as the forward pass sees them, and the loss and sparsity at each step."""
    pruner = jaxpruner.create_updater_from_config(config)  # line 1
    tx = pruner.wrap_optax(optax.adam(optax.cosine_decay_schedule(2e-3, STEPS)))  # line 2

    def step(carry, batch):
        params, opt_state = carry

        def batch_loss(params):
            return loss(
                pruner.pre_forward_update(params, opt_state), x_train[batch], y_train[batch]
            )

        value, grads = jax.value_and_grad(batch_loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        seen = {'loss': value, 'sparsity': jaxpruner.sparsity_metrics(opt_state)['_mask_sparsity']}
        return (optax.apply_updates(params, updates), opt_state), seen

    @jax.jit
    def run(params, batches):
        opt_state = tx.init(params)
        params = pruner.post_gradient_update(params, opt_state)
        (params, opt_state), seen = jax.lax.scan(step, (params, opt_state), batches)
        return pruner.pre_forward_update(params, opt_state), seen

    return run(start, np.random.default_rng(0).integers(len(x_train), size=(STEPS, BATCH_SIZE)))


dense, dense_seen = train(algorithm='no_prune')
dense_accuracy = float(accuracy(dense))
print(f'dense: {dense_accuracy:.1%} of the test images are read')
assert dense_accuracy > 0.93

# %% [markdown]
# ## Pruning at once
#
# `random` is the baseline. `saliency` needs gradients. `global_magnitude` ranks both layers together.

# %% mystnb={"image": {"alt": "Test accuracy against weights removed at once, a line for each of four algorithms"}}
SPARSITIES = np.array([0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98])
ALGORITHMS = ['random', 'magnitude', 'saliency', 'global_magnitude']

grads = jax.jit(jax.grad(loss))(dense, x_train[:1000], y_train[:1000])


def prune_at_once(**config):
    pruner = jaxpruner.create_updater_from_config(
        {'custom_sparsity_map': {'head/*': None}, **config}
    )
    return pruner.instant_sparsify(dense, grads)


curves = {algorithm: np.zeros(len(SPARSITIES)) for algorithm in ALGORITHMS}
for algorithm, (at, sparsity) in itertools.product(ALGORITHMS, enumerate(SPARSITIES)):
    pruned, _ = prune_at_once(algorithm=algorithm, sparsity=float(sparsity))
    assert abs(hidden_sparsity(pruned) - sparsity) < 1e-3
    curves[algorithm][at] = accuracy(pruned)

figure, axes = plt.subplots(figsize=(7, 3.6), layout='constrained')
for algorithm, marker in zip(ALGORITHMS, 'osD^', strict=True):
    axes.plot(100 * SPARSITIES, 100 * curves[algorithm], marker=marker, label=algorithm)
axes.axhline(100 * dense_accuracy, color='grey', linestyle='--', label='dense')
axes.set(title='Pruned at once', xlabel='weights removed (%)', ylabel='test accuracy (%)')
axes.legend()
plt.show()

# %% [markdown]
# At 80 %, random removal has destroyed the network.

# %%
at_half, at_80 = (int(np.argmin(abs(SPARSITIES - sparsity))) for sparsity in (0.5, 0.8))
assert curves['magnitude'][at_half] > dense_accuracy - 0.03
assert curves['magnitude'][at_80] > curves['random'][at_80] + 0.1

# %% [markdown]
# ## Patterns: N:M, blocks, channels
#
# Zeros that save time lie in patterns. Each pattern here removes half of the weights.

# %% mystnb={"image": {"alt": "Masks of the second layer: single weights, 2:4, 4x4 blocks, units"}}
PATTERNS = {
    'single weights': 'unstructured',
    '2:4': 'nm_2,4,0',
    '4x4 blocks': 'block_4,4',
    'units': 'channel_-1',
}

in_patterns, pattern_masks = {}, {}
figure, panels = plt.subplots(1, len(PATTERNS), figsize=(12, 3.4), layout='constrained')
for axes, (name, sparsity_type) in zip(panels, PATTERNS.items(), strict=True):
    pruned, masks = prune_at_once(algorithm='magnitude', sparsity=0.5, sparsity_type=sparsity_type)
    assert abs(hidden_sparsity(pruned) - 0.5) < 1e-3
    in_patterns[name], pattern_masks[name] = (
        float(accuracy(pruned)),
        np.asarray(masks['hidden2']['kernel']),
    )
    axes.imshow(pattern_masks[name][:40, :40], cmap='Blues', vmin=0, vmax=1.3)
    axes.set(title=f'{name}: {in_patterns[name]:.1%}', xticks=[], yticks=[])
figure.suptitle(
    f'A corner of the second layer, dark = kept, and the test accuracy (dense: {dense_accuracy:.1%})'
)
plt.show()

# %% [markdown]
# Each mask has the pattern that was asked for:

# %%
assert (pattern_masks['2:4'].reshape(-1, 4, 100).sum(axis=1) == 2).all()
assert set(np.unique(pattern_masks['4x4 blocks'].reshape(75, 4, 25, 4).sum(axis=(1, 3)))) == {0, 16}
assert set(pattern_masks['units'].sum(axis=0)) == {0, 300}

# %% [markdown]
# The freer the choice, the less is lost.

# %%
assert min(in_patterns['single weights'], in_patterns['2:4']) > dense_accuracy - 0.05
assert min(in_patterns['single weights'], in_patterns['2:4']) > max(
    in_patterns['4x4 blocks'], in_patterns['units']
)

# %% [markdown]
# ## Pruning in training
#
# Now the sparsity grows from 0 at step 50 to its target at step 300. N:M has no intermediate sparsity.

# %% mystnb={"image": {"alt": "Loss and sparsity over steps: dense, single weights, 1:4, 4x4 blocks"}}
RUNS = {
    'single weights': {'sparsity': 0.95},
    '1:4': {'sparsity': 0.75, 'sparsity_type': 'nm_1,4,0'},
    '4x4 blocks': {'sparsity': 0.9, 'sparsity_type': 'block_4,4'},
}
when = {'update_freq': 10, 'update_start_step': 50, 'update_end_step': 300}
trained = {
    name: train(algorithm='magnitude', custom_sparsity_map={'head/*': None}, **run, **when)
    for name, run in RUNS.items()
}

figure, panels = plt.subplots(1, 2, figsize=(11, 3.4), layout='constrained')
for name, (_, seen) in {'dense': (dense, dense_seen), **trained}.items():
    panels[0].semilogy(np.convolve(seen['loss'], np.ones(20) / 20, mode='valid'), label=name)
    panels[1].plot(seen['sparsity'])
panels[0].set(title='Training loss (mean of 20 steps)', xlabel='step')
panels[1].set(title='Sparsity of the hidden layers', xlabel='step')
panels[0].legend()
plt.show()

# %% [markdown]
# The table compares with pruning at once. Where few weights or only whole blocks are left, pruning in training is much
# better.

# %%
print(f'{"":16}{"sparsity":>10}{"at once":>10}{"trained":>10}   (dense: {dense_accuracy:.1%})')
for name, run in RUNS.items():
    at_once = float(accuracy(prune_at_once(algorithm='magnitude', **run)[0]))
    params, _ = trained[name]
    trained_accuracy = float(accuracy(params))
    print(f'{name:16}{hidden_sparsity(params):10.1%}{at_once:10.1%}{trained_accuracy:10.1%}')
    assert trained_accuracy > dense_accuracy - 0.04
    assert trained_accuracy > at_once + (-0.01 if name == '1:4' else 0.05)

# %% [markdown]
# ## What is left
#
# For each pixel, the weights that still look at it:

# %% mystnb={"image": {"alt": "Weights that look at each pixel: most in the middle, but even for 1:4"}}
figure, panels = plt.subplots(1, len(RUNS), figsize=(10, 3.2), layout='constrained')
for axes, (name, (params, _)) in zip(panels, trained.items(), strict=True):
    axes.imshow(
        (params['hidden1']['kernel'] != 0).sum(axis=1).reshape(SIDE, SIDE), cmap='magma', vmin=0
    )
    axes.set(title=name, xticks=[], yticks=[])
plt.show()

# %% [markdown]
# The picture for 1:4 is nearly even: every unit looks at one of each four pixels in a row.

# %%
groups = np.asarray(trained['1:4'][0]['hidden1']['kernel'] != 0).reshape(-1, 4, 300)
assert (groups.sum(axis=1) == 1).all()

# %% [markdown]
# ## Where to go from here
#
# `jaxpruner compare lenet` trains this network with many algorithms: [command line](../command_line.md).
# [deep_dive.py](deep_dive.py) writes an algorithm of your own.
