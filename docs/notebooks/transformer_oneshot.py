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
# # Prune a trained transformer once
#
# Train a small transformer on text, prune it to 2:4 with one call by each of three algorithms, and write the result
# as a file that code for PyTorch can read. The first cell installs what is missing.

# %%
import importlib.util
import subprocess
import sys

NEEDED = ('jaxpruner', 'flax', 'matplotlib', 'safetensors')
if not all(importlib.util.find_spec(name) for name in NEEDED):
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--find-links', '.']
    subprocess.run([*install, 'jaxpruner[checkpoint,flax,plot]'], check=True)

# %%
import pathlib
import tempfile
from pydoc_data import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import safetensors.numpy

import jaxpruner

# %matplotlib inline

# %% [markdown]
# ## A text
#
# Python's own language reference, half a million characters. A token is a byte.

# %%
text = '\n'.join(topics.topics[name] for name in sorted(topics.topics))
tokens = np.minimum(np.frombuffer(text.encode(), np.uint8), 127).astype(np.int32)
split = len(tokens) * 9 // 10
LENGTH = 32


def cut(tokens, number, seed):
    """Sequences of `LENGTH` tokens and the one that follows, int32[number, LENGTH + 1]."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, number)
    return jnp.asarray(tokens[starts[:, None] + np.arange(LENGTH + 1)])


print(f'{len(tokens):,} characters, for example:\n{topics.topics["lambda"][:240]}')

# %% [markdown]
# ## A transformer
#
# Two blocks, 64 wide. This code knows nothing of pruning.

# %%
WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """Attention to earlier characters, then a network for each character."""

    @nn.compact
    def __call__(self, x):
        queries, keys, values = jnp.split(nn.Dense(3 * WIDTH, name='qkv')(nn.LayerNorm()(x)), 3, -1)
        queries, keys, values = (
            part.reshape(*x.shape[:-1], HEADS, -1) for part in (queries, keys, values)
        )
        mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        x = x + nn.Dense(WIDTH, name='out')(mixed.reshape(x.shape))
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name='up')(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name='down')(hidden)


class Transformer(nn.Module):
    """Tokens to logits of the next token."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, WIDTH, name='embedding')(tokens)
        x = x + self.param('positions', nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for number in range(2):
            x = Block(name=f'block_{number}')(x)
        return nn.Dense(128, name='head')(nn.LayerNorm()(x))


model = Transformer()


def apply_fn(params, tokens):
    return model.apply({'params': params}, tokens)


@jax.jit
def loss_fn(params, sequences):
    logits = apply_fn(params, sequences[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()


# %% [markdown]
# In your own work you load a checkpoint here.

# %%
STEPS = 200
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 40, STEPS))


@jax.jit
def train(params, batches):
    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
    return params, losses


batches = cut(tokens[:split], STEPS * 16, seed=0).reshape(STEPS, 16, LENGTH + 1)
start = jax.jit(model.init)(jax.random.key(0), batches[0, :, :-1])['params']
params, losses = train(start, batches)
test = cut(tokens[split:], 512, seed=1)
losses_on_test = {'dense': float(loss_fn(params, test))}
print(f'loss on new text: {losses_on_test["dense"]:.3f} (untrained: {loss_fn(start, test):.3f})')

# %% mystnb={"image": {"alt": "Training loss over 200 steps: it falls fast at first, and is still falling at the end"}}
figure, axes = plt.subplots(figsize=(6, 2.4), layout='constrained')
axes.plot(losses)
axes.set(xlabel='step', ylabel='loss')
plt.show()

# %% [markdown]
# ## One call
#
# `jaxpruner.prune` gets the weights, the name of an algorithm, the model as a function, and a few batches of inputs.
# It traces the model, so groups of four lie along the inputs of each layer, and embeddings, biases and norms stay
# dense. The first rule of `sparsity_type` that matches wins.

# %%
calibration = [cut(tokens[:split], 32, seed)[:, :-1] for seed in (2, 3, 4, 5)]
rules = {'block_*': '2:4', '*': None}

pruned, masks = jaxpruner.prune(
    params, algorithm='wanda', sparsity_type=rules, apply_fn=apply_fn, batches=calibration
)
losses_on_test['wanda'] = float(loss_fn(pruned, test))
print(f'dense {losses_on_test["dense"]:.3f}, 2:4 {losses_on_test["wanda"]:.3f}')

# %% [markdown]
# Half of the weights of each layer in a block are zero.

# %%
print(jaxpruner.tabulate(pruned, masks))

# %% [markdown]
# A corner of one mask, with the inputs of the layer from left to right:

# %% mystnb={"image": {"alt": "Part of a mask: 8 rows of 32 weights; in each group of four weights two are dark"}}
inputs_last = masks['block_0']['up']['kernel'].T
figure, axes = plt.subplots(figsize=(8, 2.4), layout='constrained')
axes.imshow(inputs_last[:8, :32], cmap='Blues', vmin=0, vmax=1.3)
axes.set(xticks=np.arange(3.5, 32, 4), xticklabels=[], yticks=[], xlabel='inputs', ylabel='units')
axes.grid(axis='x', color='black')
plt.show()
assert (inputs_last.reshape(-1, 4).sum(axis=1) == 2).all()

# %% [markdown]
# ## Which algorithm
#
# `magnitude` removes the smallest weights, `wanda` multiplies each by the norm of its input first, and `sparsegpt` also
# changes the weights that stay.

# %%
models = {'wanda': (pruned, masks)}
for algorithm in ('magnitude', 'sparsegpt'):
    models[algorithm] = jaxpruner.prune(
        params, algorithm=algorithm, sparsity_type=rules, apply_fn=apply_fn, batches=calibration
    )
    losses_on_test[algorithm] = float(loss_fn(models[algorithm][0], test))

# %% mystnb={"image": {"alt": "Bars of the loss on new text: lowest for the dense model, sparsegpt comes next"}}
ranked = sorted(losses_on_test, key=losses_on_test.get)
figure, axes = plt.subplots(figsize=(6, 2.2), layout='constrained')
bars = axes.barh(ranked, [losses_on_test[name] for name in ranked], color='#332288')
axes.bar_label(bars, fmt='%.3f', padding=3)
axes.invert_yaxis()
axes.set(xlabel='loss on new text', xlim=(0, 1.2 * max(losses_on_test.values())))
plt.show()
assert ranked[:2] == ['dense', 'sparsegpt']

# %% [markdown]
# [One-shot pruning, measured](../oneshot.md) has a larger model and three seeds.
#
# ## Export
#
# PyTorch calls a kernel `weight` and stores it as [outputs, inputs]. The file is as large as before.


# %%
def torch_layout(layers):
    """Kernels become weights, transposed; norms and embeddings get the name, too; all other arrays stay."""
    renamed = {}
    for name, leaf in layers.items():
        if isinstance(leaf, dict):
            renamed[name] = torch_layout(leaf)
        elif name == 'kernel':
            renamed['weight'] = leaf.T
        elif name in ('scale', 'embedding'):
            renamed['weight'] = leaf
        else:
            renamed[name] = leaf
    return renamed


best, best_masks = models['sparsegpt']
folder = tempfile.TemporaryDirectory()  # in your own work, any folder
path = pathlib.Path(folder.name, 'model.safetensors')
jaxpruner.save_safetensors(torch_layout(best), path, metadata={'format': 'pt'})
print(f'{path.name}: {path.stat().st_size:,} bytes')

# %% [markdown]
# In each group of four inputs, two weights are zero:

# %%
saved = safetensors.numpy.load_file(path)
for name, leaf in saved.items():
    if name.startswith('block_') and leaf.ndim == 2:
        zeros = (leaf.reshape(-1, 4) == 0).sum(axis=1)
        print(
            f'{name:22} {leaf.shape!s:10} zeros in each group of four: {zeros.min()} to {zeros.max()}'
        )
        assert (zeros == 2).all()
folder.cleanup()

# %% [markdown]
# Next: [Prune a trained model](../how_to/prune_a_trained_model.md),
# [Fine-tune with fixed masks](../how_to/fine_tune.md), [without code](../command_line.md#checkpoints).
