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
# # Quick start
#
# This notebook prunes one model at once, and another one while it learns. The first cell installs what is missing.

# %%
import importlib.util
import subprocess
import sys

NEEDED = ('jaxpruner', 'matplotlib')
if not all(importlib.util.find_spec(name) for name in NEEDED):
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--find-links', '.']
    subprocess.run([*install, 'jaxpruner[plot]'], check=True)

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules

# %matplotlib inline

# %% [markdown]
# ## Pruning at once
#
# A *pruner* is made of parts. Magnitude pruning says **which** weights go; a distribution says **how many**.

# %%
weights = jax.random.normal(jax.random.key(0), (16, 32))

pruner = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=0.5),
)
pruned, mask = pruner.instant_sparsify(weights)

assert float(jnp.mean(pruned == 0)) == 0.5
assert jnp.abs(weights)[mask == 1].min() >= jnp.abs(weights)[mask == 0].max()

# %% [markdown]
# A third part, the sparsity type, says which weights go **together**. Each removes half of the weights:

# %% mystnb={"image": {"alt": "Masks of four sparsity types: unstructured, 2:4, blocks of 4 by 4, channels"}}
TYPES = ['unstructured', '2:4', 'block_4,4', 'channel_-1']

figure, panels = plt.subplots(1, len(TYPES), figsize=(12, 2.2), layout='constrained')
for axes, sparsity_type in zip(panels, TYPES, strict=True):
    pruner = jaxpruner.create_updater_from_config(
        {'algorithm': 'magnitude', 'sparsity': 0.5, 'sparsity_type': sparsity_type}
    )
    _, mask = pruner.instant_sparsify(weights)
    assert float(mask.mean()) == 0.5
    axes.imshow(mask, cmap='Blues', vmin=0, vmax=1.3)
    axes.set(title=sparsity_type, xticks=[], yticks=[])
figure.suptitle('Dark = kept')
plt.show()

# %% [markdown]
# ## A model
#
# Any pytree of arrays. By default kernels are pruned; leaves of one dimension stay dense, and their mask is `None`.
# `uniform` gives each kernel the same sparsity, `erk` (Evci et al., 2020) leaves small layers denser.

# %%
params = {
    'encoder': {'kernel': jnp.ones((256, 512)), 'bias': jnp.ones(512)},
    'decoder': {'kernel': jnp.ones((512, 64)), 'bias': jnp.ones(64)},
    'head': {'kernel': jnp.ones((64, 10)), 'bias': jnp.ones(10)},
}
distributions = {
    'uniform': functools.partial(sparsity_distributions.uniform, sparsity=0.9),
    'erk': functools.partial(sparsity_distributions.erk, sparsity=0.9),
    'erk, head dense': functools.partial(
        sparsity_distributions.erk, sparsity=0.9, custom_sparsity_map={'head/*': None}
    ),
}

for name, distribution in distributions.items():
    targets = {layer: leaves['kernel'] for layer, leaves in distribution(params).items()}
    print(
        f'{name:18}',
        ', '.join(f'{layer} {"-" if t is None else f"{t:.1%}"}' for layer, t in targets.items()),
    )
    sizes = {layer: params[layer]['kernel'].size for layer in targets if targets[layer] is not None}
    removed = sum(targets[layer] * size for layer, size in sizes.items())
    assert abs(removed / sum(sizes.values()) - 0.9) < 1e-3
assert distribution(params)['encoder']['bias'] is None

# %% [markdown]
# ## Pruning while training
#
# Learn a linear map in which nine of ten weights are zero. Can pruning find *which* are not?

# %%
INPUTS, OUTPUTS, SAMPLES, SPARSITY, STEPS = 32, 16, 256, 0.9, 300

rng = np.random.default_rng(0)
weights_there_are = round(INPUTS * OUTPUTS * (1 - SPARSITY))
true_mask = rng.permutation(np.arange(INPUTS * OUTPUTS) < weights_there_are).reshape(
    INPUTS, OUTPUTS
)
true_kernel = (
    true_mask * rng.choice([-1, 1], true_mask.shape) * rng.uniform(0.5, 1.5, true_mask.shape)
)
x = rng.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
y = (x @ true_kernel + 0.1 * rng.normal(size=(SAMPLES, OUTPUTS))).astype(np.float32)


def loss(params):
    return jnp.mean((x @ params['kernel'] + params['bias'] - y) ** 2)


# %% [markdown]
# The last part, the schedule, says **when**: every 10 steps, from 0 at step 50 to 90 % at step 200. Two lines are
# added: one makes the pruner, the other wraps the optimizer. Masks live in its state.


# %%
def train(pruner, params):
    """Returns what was learned, and the loss and sparsity at each step."""
    tx = pruner.wrap_optax(optax.adam(0.03))

    def step(carry, _):
        params, opt_state = carry
        # Straight-through algorithms prune in the forward pass; for all others this changes nothing.
        value, grads = jax.value_and_grad(
            lambda params: loss(pruner.pre_forward_update(params, opt_state))
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (value, jaxpruner.sparsity_metrics(opt_state)['_mask_sparsity'])

    @jax.jit
    def run(params):
        opt_state = tx.init(params)
        # Algorithms that start sparse have masks already; for all others this changes nothing.
        params = pruner.post_gradient_update(params, opt_state)
        (params, opt_state), history = jax.lax.scan(step, (params, opt_state), length=STEPS)
        return pruner.pre_forward_update(params, opt_state), opt_state, history

    return run(params)


start = {
    'kernel': jnp.asarray(0.1 * rng.normal(size=true_kernel.shape), jnp.float32),
    'bias': jnp.zeros(OUTPUTS),
}

pruner = jaxpruner.MagnitudePruning(
    scheduler=sparsity_schedules.PolynomialSchedule(
        update_freq=10, update_start_step=50, update_end_step=200
    ),
    sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=SPARSITY),
)
learned, opt_state, (losses, sparsities) = train(pruner, start)

# %% [markdown]
# Pruned weights are exactly zero, and the weights that are left are the right ones.

# %%
assert np.array_equal(learned['kernel'] != 0, opt_state.masks['kernel'])
assert np.array_equal(opt_state.masks['kernel'], true_mask)
print(
    f'{jaxpruner.summarize_sparsity(learned)["kernel"]:.1%} of the kernel is zero, loss {losses[-1]:.4f}'
)

# %% [markdown]
# The loss falls to that of the noise, 0.01.

# %% mystnb={"image": {"alt": "Sparsity grows to its target while the loss falls to that of the noise"}}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout='constrained')
left.plot(sparsities)
left.set(title='Sparsity', xlabel='step', ylim=(0, 1))
right.semilogy(losses)
right.axhline(0.01, color='grey', linestyle='--', label='noise')
right.set(title='Loss', xlabel='step')
right.legend()
plt.show()
assert np.all(np.diff(sparsities) >= 0)
assert losses[-1] < 0.02

# %% [markdown]
# ## Another algorithm is another name
#
# `random` removes weights at random. `magnitude_ste` prunes in the forward pass. `rigl` starts with a random mask and
# moves it. `use_packed_masks` keeps masks at one bit per weight.

# %%
config = {
    'sparsity': SPARSITY,
    'update_freq': 10,
    'update_start_step': 50,
    'update_end_step': 200,
    'drop_fraction': 0.5,
    'use_packed_masks': True,
}
found, right = {'magnitude': learned['kernel']}, {}
for name in ('random', 'magnitude_ste', 'rigl'):
    result, packed_state, _ = train(
        jaxpruner.create_updater_from_config({**config, 'algorithm': name}), start
    )
    assert packed_state.masks['kernel'].nbytes * 8 == opt_state.masks['kernel'].nbytes
    found[name] = result['kernel']

for name, kernel in found.items():
    assert np.count_nonzero(kernel) <= weights_there_are
    right[name] = np.count_nonzero(kernel[true_mask]) / weights_there_are
    print(f'{name:15} finds {right[name]:6.1%} of the weights that there are')

assert right['magnitude'] == 1
assert right['random'] < 0.3 < 0.8 < min(right['magnitude_ste'], right['rigl'])

# %% mystnb={"image": {"alt": "Weights that each algorithm kept: right, wrong and missed ones"}}
COLORS = {'right': '#44aa99', 'wrong': '#882255', 'missed': '#ddcc77'}

figure, panels = plt.subplots(1, len(found), figsize=(12, 2.2), layout='constrained')
for axes, (name, kernel) in zip(panels, found.items(), strict=True):
    kept, there = np.asarray(kernel != 0).T, true_mask.T
    kinds = np.select([kept & there, kept & ~there, ~kept & there], [1, 2, 3], 0)
    axes.imshow(kinds, cmap=ListedColormap(['#eeeeee', *COLORS.values()]), vmin=0, vmax=3)
    axes.set(title=name, xticks=[], yticks=[])
figure.legend(
    handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()], loc='outside right'
)
plt.show()

# %% [markdown]
# ## Training on
#
# `masks_from_zeros` reads the masks off a sparse model, and `FixedMask` holds them.

# %%
fixed = jaxpruner.FixedMask(jaxpruner.masks_from_zeros(learned))
tuned, _, (losses, _) = train(fixed, learned)
assert np.array_equal(tuned['kernel'] != 0, learned['kernel'] != 0)
assert losses[-1] <= losses[0]

# %% [markdown]
# Next: [deep_dive.py](deep_dive.py), [mnist_pruning.py](mnist_pruning.py), [How-to](../how_to/index.md),
# [Which algorithm when](../explanation/which_algorithm.md).
