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
# # Deep dive: write your own algorithm
#
# An algorithm is a dataclass that derives from `jaxpruner.BaseUpdater` and overrides as little as it can. This notebook
# writes two algorithms, a schedule and a distribution, and trains on handwritten digits:
#
# 1. The first algorithm only **scores** weights differently, in the manner of Wanda (Sun et al., 2023).
# 2. The second **starts sparse and moves its masks**, with the same number of inputs for each unit, in the manner of
#    SRigL (Lasby et al., 2023).
#
# What a step does is written once, in the base class. In outline:
#
# ```python
# def init(params):
#     targets = sparsity_distribution_fn(params)      # how sparse each leaf is to be, None = dense
#     masks = get_initial_masks(params, targets)      # <- override to start sparse
#     return SparseState(masks, optimizer.init(params), targets, count=0)
#
# def update(grads, state, params):
#     state = track(state, params, grads)             # <- override to keep values of every step
#     if scheduler.is_mask_update_iter(state.count):  # inside the compiled program, and paid for only when true
#         state = update_state(state, params, grads)  # <- override to choose masks otherwise than by a ranking
#         #   sparsities = scheduler.get_sparsity_at_step(targets, count)
#         #   scores = calculate_scores(params, state, grads)         # <- override to rank otherwise
#         #   masks = create_masks(scores, sparsities)
#     updates, inner_state = optimizer.update(grads, state.inner_state, params)
#     return updates_that_land_pruned_weights_on_zero, state
# ```
#
# The first cell installs what is missing, with jaxpruner from the wheel beside this notebook. Without a wheel, pip
# looks in its package index, and fails if jaxpruner is not there.

# %%
import importlib.util
import subprocess
import sys

NEEDED = ('jaxpruner', 'flax', 'matplotlib', 'orbax', 'rich', 'sklearn', 'tensorboardX', 'tyro')
if not all(importlib.util.find_spec(name) for name in NEEDED):
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--find-links', '.']
    subprocess.run([*install, 'jaxpruner[baselines]'], check=True)

# %%
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpruner
from jaxpruner import pruners, sparsity_distributions, sparsity_schedules, tree
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner.baselines import data

# %matplotlib inline

# %% [markdown]
# ## The task
#
# The digits of scikit-learn have 8x8 pixels, many of them always dark. A network with one hidden layer reads them.

# %%
HIDDEN, STEPS = 64, 300

digits = data.read_digits()
x_train, x_test = (
    digits[key].reshape(-1, 64).astype(np.float32) / 16 for key in ('x_train', 'x_test')
)
y_train, y_test = digits['y_train'], digits['y_test']
is_dark = x_train.max(axis=0) < 0.1
print(
    f'{len(x_train)} images for training, {len(x_test)} for testing; {is_dark.sum()} of 64 pixels are always dark'
)


def hidden_units(params, x):
    return jax.nn.relu(x @ params['hidden']['kernel'] + params['hidden']['bias'])


def logits(params, x):
    return hidden_units(params, x) @ params['head']['kernel'] + params['head']['bias']


def loss(params):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x_train), y_train).mean()


@jax.jit
def accuracy(params):
    return jnp.mean(logits(params, x_test).argmax(-1) == y_test)


rng = np.random.default_rng(0)
start = {
    'hidden': {'kernel': rng.normal(size=(64, HIDDEN)) / 8, 'bias': np.zeros(HIDDEN)},
    'head': {'kernel': rng.normal(size=(HIDDEN, 10)) / 8, 'bias': np.zeros(10)},
}
start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start)


# %% [markdown]
# One function trains with any pruner, and records the loss, the hidden kernel and its mask at each step.


# %%
def train(pruner):
    tx = pruner.wrap_optax(optax.adam(0.01))

    def step(carry, _):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        seen = {
            'loss': value,
            'kernel': params['hidden']['kernel'],
            'mask': opt_state.masks['hidden']['kernel'],
        }
        return (params, opt_state), seen

    @jax.jit
    def run(params):
        opt_state = tx.init(params)
        params = pruner.post_gradient_update(params, opt_state)  # for algorithms that start sparse
        return jax.lax.scan(step, (params, opt_state), length=STEPS)

    (params, opt_state), seen = run(start)
    return params, opt_state, jax.tree.map(np.asarray, seen)


dense, _, _ = train(jaxpruner.NoPruning())
print(f'dense: {accuracy(dense):.1%} of the test images are read')
assert accuracy(dense) > 0.93

# %% [markdown]
# ## Scores alone
#
# The largest scores are kept. These few lines are magnitude pruning, with any sparsity type.


# %%
@dataclasses.dataclass
class MyMagnitude(jaxpruner.BaseUpdater):
    """Removes the smallest weights."""

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)


at_90 = functools.partial(
    sparsity_distributions.uniform, sparsity=0.9, custom_sparsity_map={'head/*': None}
)
for sparsity_type in ('unstructured', 'block_4,4'):
    settings = {'sparsity_distribution_fn': at_90, 'sparsity_type': sparsity_type}
    _, mine = MyMagnitude(**settings).instant_sparsify(dense)
    _, theirs = jaxpruner.MagnitudePruning(**settings).instant_sparsify(dense)
    assert np.array_equal(mine['hidden']['kernel'], theirs['hidden']['kernel'])

# %% [markdown]
# A score may need more: make it an argument of `calculate_scores`, and pass it under the same name to
# `instant_sparsify` or `update`. Wanda multiplies a weight's magnitude by the size of its input. `None` stands for
# leaves that are not scored.


# %%
@dataclasses.dataclass
class ActivationPruning(jaxpruner.BaseUpdater):
    """Removes the weights that are smallest once multiplied by the root mean square of their input."""

    def calculate_scores(self, params, sparse_state=None, grads=None, input_sizes=None):
        if input_sizes is None:
            raise ValueError(
                'activation pruning needs input_sizes: {layer: a vector with a number for each input}'
            )

        def scores(layer, leaves):
            return {'kernel': jnp.abs(leaves['kernel']) * input_sizes[layer][:, None], 'bias': None}

        return {layer: scores(layer, leaves) for layer, leaves in params.items()}


def root_mean_square(values):
    return jnp.sqrt(jnp.mean(values**2, axis=0))


input_sizes = {
    'hidden': root_mean_square(x_train),
    'head': root_mean_square(hidden_units(dense, x_train)),
}
by_magnitude, magnitude_masks = MyMagnitude(sparsity_distribution_fn=at_90).instant_sparsify(dense)
by_activation, activation_masks = ActivationPruning(
    sparsity_distribution_fn=at_90
).instant_sparsify(dense, input_sizes=input_sizes)

for name, pruned in {'magnitude': by_magnitude, 'activation': by_activation}.items():
    assert abs(jaxpruner.summarize_sparsity(pruned)['hidden/kernel'] - 0.9) < 1e-3
    print(f'{name:10} 90 % pruned at once: {accuracy(pruned):.1%}')
assert accuracy(by_activation) > accuracy(by_magnitude) + 0.02

# %% [markdown]
# How many hidden units still look at each pixel? Magnitude keeps weights of dark pixels, which were never trained.


# %% mystnb={"image": {"alt": "Kept weights a pixel: magnitude keeps those of dark pixels, activation none"}}
def show_pixels(maps, title):
    figure, panels = plt.subplots(
        1, len(maps), figsize=(2.6 * len(maps), 2.8), layout='constrained', squeeze=False
    )
    top = max(float(values.max()) for values in maps.values())
    for axes, (name, values) in zip(panels[0], maps.items(), strict=True):
        image = axes.imshow(np.reshape(values, (8, 8)), cmap='magma', vmin=0, vmax=top)
        axes.set(title=name, xticks=[], yticks=[])
    figure.colorbar(image, ax=panels[0].tolist(), shrink=0.8)
    figure.suptitle(title)
    plt.show()


kept_by_magnitude = magnitude_masks['hidden']['kernel'].sum(axis=1)
kept_by_activation = activation_masks['hidden']['kernel'].sum(axis=1)
show_pixels(
    {'magnitude': kept_by_magnitude, 'activation': kept_by_activation},
    'Weights kept, by the pixel that they look at',
)
assert kept_by_activation[is_dark].sum() == 0 < kept_by_magnitude[is_dark].sum()

# %% [markdown]
# ## A distribution of your own
#
# Any function from parameters to a tree of targets, `None` where dense. Here each unit keeps `fan_in` inputs.


# %%
def same_fan_in(params, fan_in):
    """The sparsity at which each unit keeps `fan_in` inputs; the head and all biases stay dense."""
    return {
        layer: {
            'kernel': None if layer == 'head' else 1 - fan_in / len(leaves['kernel']),
            'bias': None,
        }
        for layer, leaves in params.items()
    }


print(same_fan_in(start, fan_in=8))
assert same_fan_in(start, fan_in=8)['hidden'] == {'kernel': 0.875, 'bias': None}

# %% [markdown]
# Often a map of exceptions to `uniform` or `erk` is enough. A key that matches nothing is an error.

# %%
mapped = sparsity_distributions.erk(
    start, sparsity=0.8, custom_sparsity_map={'head/*': None, 'hidden/kernel': 0.95}
)
assert mapped == {'head': {'bias': None, 'kernel': None}, 'hidden': {'bias': None, 'kernel': 0.95}}

try:
    sparsity_distributions.uniform(start, 0.8, custom_sparsity_map={'haed/*': None})
except ValueError as error:
    print(error)
else:
    raise AssertionError('a name without a leaf was taken')

# %% [markdown]
# ## A schedule of your own
#
# Any object with two methods. Both are called with a traced step: no `if`. Here the sparsity rises along half a cosine.


# %%
@dataclasses.dataclass(frozen=True)
class CosineSchedule:
    """Sparsity rises to the target along half a cosine, and stays there."""

    update_freq: int
    update_end_step: int

    def is_mask_update_iter(self, step):
        return (step % self.update_freq == 0) & (step <= self.update_end_step)

    def get_sparsity_at_step(self, target_sparsities, step):
        progress = jnp.clip(step / self.update_end_step, 0, 1)
        return jax.tree.map(
            lambda target: target * (1 - jnp.cos(jnp.pi * progress)) / 2, target_sparsities
        )


schedule = CosineSchedule(update_freq=20, update_end_step=200)
pruned, _, seen = train(MyMagnitude(scheduler=schedule, sparsity_distribution_fn=at_90))
sparsity_seen = 1 - seen['mask'].mean(axis=(1, 2))
print(f'{accuracy(pruned):.1%} with 90 % pruned in training')

# %% [markdown]
# At each update the masks have the sparsity that the schedule asks for. The dotted line is Zhu and Gupta's (2017).

# %% mystnb={"image": {"alt": "Sparsity of the masks follows the cosine schedule; the loss has a peak an update"}}
polynomial = sparsity_schedules.PolynomialSchedule(
    update_freq=20, update_start_step=0, update_end_step=200
)
shown = range(0, STEPS, 5)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout='constrained')
left.plot(sparsity_seen, label='masks')
left.plot(
    shown,
    [schedule.get_sparsity_at_step(0.9, step) for step in shown],
    'k--',
    label='CosineSchedule',
)
left.plot(
    shown,
    [polynomial.get_sparsity_at_step(0.9, step) for step in shown],
    'k:',
    label='PolynomialSchedule',
)
left.set(title='Sparsity', xlabel='step')
left.legend()
right.semilogy(seen['loss'])
right.set(title='Loss', xlabel='step')
plt.show()

for step in range(0, STEPS, 20):
    assert abs(sparsity_seen[step] - float(schedule.get_sparsity_at_step(0.9, step))) < 1e-3, step

# %% [markdown]
# ## Sparse from the start
#
# Override `get_initial_masks` to begin sparse, and `update_state` to move masks. Ours keeps the same number of
# weights in each column. If only the selection differs, `topk_fn` is enough:


# %%
def ranks_in_columns(scores):
    """0 for the largest score of each column; what comes first wins a tie."""
    return jnp.argsort(jnp.argsort(-scores, axis=0), axis=0)


def top_of_each_column(scores, sparsity):
    """A mask with the same number of weights in each column."""
    kept = jnp.maximum(1, jnp.round(scores.shape[0] * (1 - sparsity)))
    return (ranks_in_columns(scores) < kept).astype(jnp.uint8)


eight_inputs = functools.partial(same_fan_in, fan_in=8)
_, masks = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=eight_inputs, topk_fn=top_of_each_column
).instant_sparsify(dense)
assert (masks['hidden']['kernel'].sum(axis=0) == 8).all()

# %% [markdown]
# The class:
#
# - A field **needs a type annotation**; without one it is not a field.
# - `skip_gradients`: the optimizer does not run in a step that moves masks.
# - `is_sparse_gradients`: the optimizer sees no gradients of pruned weights; `update_state` does.
# - `regrows_from_zero = True`: regrown weights start at zero.
# - `restart_inner_state` lets the optimizer forget the moments of regrown weights.


# %%
@dataclasses.dataclass
class ConstantFanIn(jaxpruner.BaseUpdater):
    """Replaces the smallest weights of each unit by those of its inputs with the largest gradients.

    Attributes:
      replaced_share: share of the weights of each unit that a mask update replaces.
    """

    regrows_from_zero: ClassVar[bool] = True

    skip_gradients: bool = True
    is_sparse_gradients: bool = True
    replaced_share: float = 0.3

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.replaced_share <= 1:
            raise ValueError(f'replaced_share must lie in [0, 1], got {self.replaced_share}')

    def get_initial_masks(self, params, target_sparsities):
        def random_mask(scores, sparsity):
            return None if sparsity is None else top_of_each_column(scores, sparsity)

        scores = pruners.generate_random_scores(params, self.rng_seed)
        return tree.map_with_missing(random_mask, scores, target_sparsities)

    def update_state(self, sparse_state, params, grads):
        def replace(param, mask, grad):
            if mask is None:
                return None
            fan_in = mask[:, 0].sum()
            lost = jnp.round(self.replaced_share * fan_in)
            stays = ranks_in_columns(jnp.where(mask == 1, jnp.abs(param), -1)) < fan_in - lost
            promise = jnp.where(stays, jnp.inf, jnp.abs(grad))
            return (ranks_in_columns(promise) < fan_in).astype(jnp.uint8)

        old = sparse_state.masks
        new = tree.map_with_missing(replace, params, old, grads)
        regrown = jax.tree.map(lambda old, new: (old == 0) & (new == 1), old, new)
        inner_state = sparse_state_lib.restart_inner_state(sparse_state.inner_state, regrown)
        return sparse_state._replace(masks=new, inner_state=inner_state)

    def instant_sparsify(self, params, grads=None):
        raise RuntimeError(
            'ConstantFanIn trains sparse from the start: use wrap_optax, or topk_fn to prune at once'
        )


# %% [markdown]
# At every step each unit has 8 inputs, and pruned and regrown weights are zero.

# %%
pruner = ConstantFanIn(
    scheduler=sparsity_schedules.PeriodicSchedule(update_freq=20, update_end_step=200),
    sparsity_distribution_fn=eight_inputs,
)
params, _, seen = train(pruner)
came_back = (seen['mask'][:-1] == 0) & (seen['mask'][1:] == 1)
print(f'{accuracy(params):.1%} with 8 of 64 inputs for each unit (dense: {accuracy(dense):.1%})')

assert (seen['mask'].sum(axis=1) == 8).all()
assert not seen['kernel'][seen['mask'] == 0].any()
assert not seen['kernel'][1:][came_back].any()
assert set(np.flatnonzero(came_back.any(axis=(1, 2))) + 1) == set(range(20, 201, 20))

# %% [markdown]
# A weight of a dark pixel has no gradient, and is dropped. Weights of other pixels take its place.

# %% mystnb={"image": {"alt": "Units that look at each pixel, first and last step: at the end none at dark ones"}}
first, last = seen['mask'][0].sum(axis=1), seen['mask'][-1].sum(axis=1)
show_pixels({'first step': first, 'last step': last}, 'Units that look at each pixel')
assert last[is_dark].sum() < first[is_dark].sum()

# %% [markdown]
# The class refuses to prune at once:

# %%
try:
    pruner.instant_sparsify(params)
except RuntimeError as error:
    print(error)
else:
    raise AssertionError('instant_sparsify was not refused')

# %% [markdown]
# ## A name of its own
#
# A comparison is a loop over names. Masks may be packed: the methods get them unpacked.

# %% mystnb={"image": {"alt": "Loss over steps of static_sparse, rigl and constant_fan_in"}}
jaxpruner.register_algorithm('constant_fan_in', ConstantFanIn)
config = {
    'algorithm': 'constant_fan_in',
    'sparsity': 0.875,
    'custom_sparsity_map': {'head/*': None},
    'update_freq': 20,
    'update_start_step': 0,
    'update_end_step': 200,
    'drop_fraction': 0.3,  # of SET and RigL
    'replaced_share': 0.3,  # of ours
    'use_packed_masks': True,
}
results = {}
for name in ('static_sparse', 'rigl', 'constant_fan_in'):
    params, opt_state, results[name] = train(
        jaxpruner.create_updater_from_config({**config, 'algorithm': name})
    )
    stored = opt_state.masks['hidden']['kernel']
    inputs = sparse_state_lib.unpack_like(stored, (64, HIDDEN)).sum(axis=0)
    assert stored.nbytes == 64 * HIDDEN // 8
    assert inputs.sum() == 8 * HIDDEN
    print(f'{name:16} {accuracy(params):.1%}, a unit has {inputs.min()} to {inputs.max()} inputs')
assert (inputs == 8).all()
np.testing.assert_allclose(results['constant_fan_in']['loss'][:50], seen['loss'][:50], rtol=1e-3)

figure, axes = plt.subplots(figsize=(6, 3), layout='constrained')
for name, result in results.items():
    axes.semilogy(result['loss'], label=name)
axes.set(xlabel='step', ylabel='loss')
axes.legend()
plt.show()

# %% [markdown]
# A wrong setting is refused before anything is traced:

# %%
for wrong in ({'replaced_share': 1.5}, {'replaced_shares': 0.3}, {'sparsity': 90}):
    try:
        jaxpruner.create_updater_from_config({**config, **wrong})
    except ValueError as error:
        print(f'{wrong}: {error}')
    else:
        raise AssertionError(f'{wrong} was taken')

# %% [markdown]
# ## All hooks
#
# [What the hooks are for](../../CONTRIBUTING.md#what-the-hooks-are-for) lists every method that an algorithm may
# override.
