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
# # An algorithm of one's own, with a score that needs its own state
#
# You will write an algorithm. It begins as a score of three lines, gets a memory that is saved, sharded and compiled
# with everything else, and in the end a name. The first cell installs what is missing.

# %%
import importlib.util
import subprocess
import sys

NEEDED = ('jaxpruner', 'matplotlib', 'sklearn')
if not all(importlib.util.find_spec(name) for name in NEEDED):
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--find-links', '.']
    subprocess.run([*install, 'jaxpruner[plot]', 'scikit-learn'], check=True)

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxpruner
from jaxpruner import tree

# %matplotlib inline

# %% [markdown]
# ## Something to prune
#
# A network with one hidden layer, in plain JAX, that reads digits of 8x8 pixels.

# %%
HIDDEN, STEPS, BATCH_SIZE, SEEDS = 128, 300, 16, 4

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    (images / 16).astype(np.float32), labels.astype(np.int32), test_size=0.25, random_state=0
)
x_train, y_train = jnp.asarray(x_train), jnp.asarray(y_train)


def logits(params, x):
    hidden = jax.nn.relu(x @ params['hidden']['kernel'] + params['hidden']['bias'])
    return hidden @ params['head']['kernel'] + params['head']['bias']


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def new_params(seed):
    keys = jax.random.split(jax.random.key(seed))
    return {
        'hidden': {
            'kernel': jax.random.normal(keys[0], (64, HIDDEN)) / 8,
            'bias': jnp.zeros(HIDDEN),
        },
        'head': {'kernel': jax.random.normal(keys[1], (HIDDEN, 10)) / 11, 'bias': jnp.zeros(10)},
    }


def train(pruner):
    """Trains a network for each seed; returns their parameters, optimizer states and accuracies."""
    tx = pruner.wrap_optax(optax.adam(3e-3))

    def step(carry, chosen):
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, x_train[chosen], y_train[chosen])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def run(seed):
        params = new_params(seed)
        order = jax.random.randint(jax.random.key(seed), (STEPS, BATCH_SIZE), 0, len(x_train))
        (params, opt_state), _ = jax.lax.scan(step, (params, tx.init(params)), order)
        accuracy = jnp.mean(logits(params, x_test).argmax(axis=-1) == y_test)
        return params, opt_state, accuracy

    return jax.jit(lambda seeds: jax.lax.map(run, seeds))(jnp.arange(SEEDS))


def note(name, accuracies):
    results[name] = 100 * np.asarray(accuracies)
    print(f'{name:14} {results[name].mean():.1f} % ± {results[name].std(ddof=1):.1f}')


# %% [markdown]
# All algorithms remove 19 of 20 weights at one step, in the middle of the training. The baseline is magnitude pruning.

# %%
settings = {'sparsity': 0.95, 'scheduler': jaxpruner.OneShotSchedule(STEPS // 2)}
results = {}

magnitude_params, _, accuracies = train(jaxpruner.MagnitudePruning(**settings))
note('magnitude', accuracies)

# %% [markdown]
# ## A score of three lines
#
# If a weight $w$ is set to zero, the loss rises by about $\frac{1}{2} h w^2$, where $h$ is the curvature (LeCun et
# al., "Optimal Brain Damage", 1989). A rough stand-in for $h$ is the magnitude of the gradient $g$.
# `calculate_scores` returns a score for each weight; the largest are kept.


# %%
@dataclasses.dataclass
class Damage(jaxpruner.BaseUpdater):
    """Keeps the weights with the largest product of squared weight and gradient's magnitude."""

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda param, grad: param**2 * jnp.abs(grad), params, grads)


*_, accuracies = train(Damage(**settings))
note('one gradient', accuracies)

# %% [markdown]
# That is bad: the gradient of one batch of 16 images is mostly noise.
#
# ## A memory
#
# Adam keeps an average of squared gradients. Our algorithm needs one, too:
#
# | method | is called | returns |
# |---|---|---|
# | `init_algorithm_state` | once, by `init` | the memory: any pytree of arrays |
# | `track` | in every step, before masks are chosen | the state with the updated memory |
# | `calculate_scores` | after `track`, when a mask update is due | the scores; it reads the memory |
#
# - Leaves that stay dense have the target `None`. `tree.map_with_missing` is `jax.tree.map` for trees in which a leaf
#   may be `None`; the first tree has to have all leaves.
# - Structure, shapes and dtypes of the memory must not change. It is float32, since sums of small numbers vanish in
#   bfloat16.
#
# A setting is a field with a type annotation. `super().__post_init__()` checks the fields of `BaseUpdater`; check
# your own beside it.


# %%
@dataclasses.dataclass
class AveragedDamage(jaxpruner.BaseUpdater):
    """Keeps the weights whose squares, times the root of their averaged squared gradients, are largest.

    Attributes:
      decay: share of the average that stays in each step.
    """

    decay: float = 0.99

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ValueError(f'decay must lie in [0, 1), got {self.decay}')

    def init_algorithm_state(self, params, target_sparsities):
        def zeros(param, target):
            return None if target is None else jnp.zeros_like(param, dtype=jnp.float32)

        return tree.map_with_missing(zeros, params, target_sparsities)

    def track(self, sparse_state, params, grads):
        def renew(grad, average):
            return None if average is None else self.decay * average + (1 - self.decay) * grad**2

        averages = tree.map_with_missing(renew, grads, sparse_state.algorithm_state)
        return sparse_state._replace(algorithm_state=averages)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        # Pruning at once, by instant_sparsify or prune, has no steps to remember.
        if sparse_state is None:
            raise ValueError('AveragedDamage needs the gradients of a training: use wrap_optax')

        def score(param, average):
            return None if average is None else param**2 * jnp.sqrt(average)

        return tree.map_with_missing(score, params, sparse_state.algorithm_state)


# %% [markdown]
# The memory is part of the optimizer's state.

# %%
pruner = AveragedDamage(**settings)
params, opt_state, accuracies = train(pruner)
note('with memory', accuracies)
assert results['with memory'].mean() > results['one gradient'].mean() + 5

# %% mystnb={"image": {"alt": "Accuracies of four seeds: lowest with one gradient, highest with memory"}}
figure, axes = plt.subplots(figsize=(6, 2.4), layout='constrained')
for row, values in enumerate(results.values()):
    axes.plot(values, [row] * SEEDS, 'o', color='#332288', alpha=0.5)
    axes.plot(values.mean(), row, '|', color='#cc6677', markersize=24, markeredgewidth=3)
axes.set_yticks(range(len(results)), results)
axes.set(xlabel='accuracy on test images (%); bars are means', ylim=(2.5, -0.5))
plt.show()

# %% [markdown]
# In practice, prune gradually: the noise matters less, and the two scores are about equally good.

# %%
gradually = jaxpruner.PolynomialSchedule(update_freq=10, update_start_step=50, update_end_step=200)
for algorithm in (Damage, AveragedDamage):
    *_, gradual_accuracies = train(algorithm(sparsity=0.95, scheduler=gradually))
    print(f'{algorithm.__name__:14} {100 * gradual_accuracies.mean():.1f} %, pruned gradually')
    assert 100 * gradual_accuracies.mean() > results['one gradient'].mean() + 5

# %% [markdown]
# `jaxpruner compare --modules mine` compares algorithms that your `mine.py` registers:
# [Command line](../command_line.md#workloads).
#
# ## Look into the memory
#
# `sparse_states` finds the state, however deep it is nested. The first axis of each array counts seeds.

# %%
(state,) = jaxpruner.sparse_states(opt_state)
print(jax.tree.map(jnp.shape, state.algorithm_state))
assert state.algorithm_state['hidden']['bias'] is None

# %% mystnb={"image": {"alt": "Maps of 8 by 8 pixels: at the dark edges gradients vanish, and no weights are kept"}}
slopes = np.sqrt(np.asarray(state.algorithm_state['hidden']['kernel'][0])).mean(axis=1)
kept = np.asarray(state.masks['hidden']['kernel'][0]).sum(axis=1)
maps = {'root mean square of gradients': slopes, 'weights kept': kept}
figure, panels = plt.subplots(1, 2, figsize=(7, 3), layout='constrained')
for axes, (title, values) in zip(panels, maps.items(), strict=True):
    axes.imshow(values.reshape(8, 8), cmap='magma', vmin=0)
    axes.set(title=title, xticks=[], yticks=[])
plt.show()

is_dark = np.asarray(x_train).max(axis=0) == 0
assert kept[is_dark].sum() == 0

# %% [markdown]
# Weights of dark pixels have no gradient, and none is kept. Magnitude pruning keeps some: they were never trained.

# %%
by_magnitude = np.asarray(magnitude_params['hidden']['kernel'][0] != 0).sum(axis=1)
print(
    f'{by_magnitude[is_dark].sum()} weights of magnitude pruning look at pixels that are always dark'
)
assert by_magnitude[is_dark].sum() > 0

# %% [markdown]
# The mask itself, with a row for each pixel:

# %% mystnb={"image": {"alt": "The mask of the hidden layer, 64 pixels down and 128 units across; some rows are empty"}}
jaxpruner.report.plot_masks({'hidden/kernel': state.masks['hidden']['kernel'][0]})

# %% [markdown]
# ## A name
#
# An algorithm with a name can be made from a configuration. With packed masks, `track` gets packed ones.

# %%
jaxpruner.register_algorithm('averaged_damage', AveragedDamage)
config = {
    'algorithm': 'averaged_damage',
    'sparsity': 0.95,
    'update_start_step': STEPS // 2,
    'update_end_step': STEPS // 2,  # the same step: prune once
    'use_packed_masks': True,
    'decay': 0.99,
}
_, packed_state, packed_accuracies = train(jaxpruner.create_updater_from_config(config))
np.testing.assert_allclose(packed_accuracies, accuracies, atol=0.01)

for wrong in ({'decay': 1.5}, {'decay': '0.9'}, {'decai': 0.99}):
    try:
        jaxpruner.create_updater_from_config({**config, **wrong})
    except (TypeError, ValueError) as error:
        print(error)
    else:
        raise AssertionError(f'{wrong} was taken')

# %% [markdown]
# Next: [Deep dive](deep_dive.py), [the hooks](../../CONTRIBUTING.md#what-the-hooks-are-for).
