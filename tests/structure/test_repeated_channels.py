"""Groups whose channels lie several times along one axis: as factors (h ⊗ h), as segments (h, h), or as both."""

import itertools
import string

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.structure import GroupedChannels, channel_groups, group_lasso

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


class Model:
    """Products of hidden values, side by side: `words` (0, 0, 1) and (1,) make `(h0 ⊗ h0 ⊗ h1, h1) @ out`.

    Attributes:
      params: `up{i}` makes hidden value i, of `sizes[i]` channels; `square{i}`, a square matrix stored flat, mixes them
        if `has_squares[i]`.
      channels: leaf -> for each axis, for each position, the channels that lie there, as pairs (hidden value, index).
    """

    def __init__(self, sizes, words, has_squares):
        self.sizes, self.words, self.has_squares = sizes, words, has_squares
        self.channels = {}
        rows = []
        for word in words:
            indices = itertools.product(*[range(sizes[i]) for i in word])
            rows += [set(zip(word, index, strict=True)) for index in indices]
        inputs, results = [set()] * 3, [set()] * 2
        for i in {i for word in words for i in word}:
            own = [{(i, channel)} for channel in range(sizes[i])]
            self.channels[f'up{i}'] = [inputs, own]
            if has_squares[i]:
                self.channels[f'square{i}'] = [[a | b for a in own for b in own]]
        self.channels['out'] = [rows, results]
        rng = np.random.default_rng(1)
        self.params = {}
        for name, axes in self.channels.items():
            self.params[name] = jnp.asarray(rng.normal(size=list(map(len, axes))), jnp.float32)

    def apply(self, params, x):
        hidden = []
        for i, size in enumerate(self.sizes):
            h = jnp.tanh(x @ params[f'up{i}']) if f'up{i}' in params else None
            if f'square{i}' in params:
                h = h + h @ params[f'square{i}'].reshape(size, size)
            hidden.append(h)
        parts = []
        for word in self.words:
            letters = string.ascii_lowercase[: len(word)]
            operands = ','.join(f'z{letter}' for letter in letters)
            values = [hidden[i] for i in word]
            parts.append(jnp.einsum(f'{operands}->z{letters}', *values).reshape(len(x), -1))
        return jnp.concatenate(parts, -1) @ params['out']

    def weights_with(self, i, channel=None):
        """Leaf -> flags of its weights in a channel of hidden value i, or in any."""
        flags = {}
        for name, axes in self.channels.items():
            of_axes = []
            for positions in axes:
                wanted = {(i, c) for c in range(self.sizes[i]) if channel in (None, c)}
                of_axes.append([bool(wanted & here) for here in positions])
            flags[name] = np.array(of_axes[0])
            for along in of_axes[1:]:
                flags[name] = flags[name][..., None] | np.array(along)
        return flags

    def kept_positions(self, keep):
        """Leaf -> the positions that stay along each axis."""
        kept = {}
        for name, axes in self.channels.items():
            kept[name] = []
            for positions in axes:
                stays = [all(channel in keep[i] for i, channel in here) for here in positions]
                kept[name].append(np.flatnonzero(stays))
        return kept

    def group_of(self, graph, i):
        (group,) = [each for each in graph.groups.values() if f'up{i}' in each.name]
        return group


MODELS = {
    'bilinear': Model([4], [[0, 0]], [False]),
    'flat square': Model([3], [[0]], [True]),
    'cubes beside': Model([3, 2], [[0, 0, 0], [1, 0], [0]], [True, False]),
    'around': Model([2, 3], [[0, 1, 0]], [False, True]),
}


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_each_weight_counts_once_for_each_of_its_channels(model):
    """What is cut, zeroed and counted, the scores of a ranking in training, and the norms of a group lasso."""
    params, graph = model.params, channel_groups(model.apply, model.params, X)
    keep, names = {}, {}
    factors = {name: np.ones(leaf.shape) for name, leaf in params.items()}
    for i, size in enumerate(model.sizes):
        group = model.group_of(graph, i)
        assert group.exact
        assert group.parameters == sum(flags.sum() for flags in model.weights_with(i).values())
        scores = np.zeros(size)
        for channel in range(size):
            flags = model.weights_with(i, channel)
            weights = np.concatenate([np.asarray(params[name])[flags[name]] for name in flags])
            scores[channel] = np.abs(weights).sum()
            shrinkage = max(0, 1 - 0.5 * np.sqrt(weights.size / (weights**2).sum()))
            for name in flags:
                factors[name][flags[name]] *= shrinkage
        keep[i] = np.sort(np.argsort(-scores)[: round(size / 2)])
        names[group.name] = keep[i].tolist()
    pruner = jaxpruner.MagnitudePruning(sparsity_type=GroupedChannels(graph), sparsity=0.5)
    pruned, masks = pruner.instant_sparsify(params)
    zeroed, small = graph.zeroed(params, names), graph.shrink(params, names)
    for name, kept in model.kept_positions(keep).items():
        mask = np.zeros(params[name].shape)
        mask[np.ix_(*kept)] = 1
        np.testing.assert_array_equal(masks[name], mask)
        np.testing.assert_array_equal(zeroed[name], params[name] * mask)
        np.testing.assert_array_equal(pruned[name], zeroed[name])
        np.testing.assert_array_equal(small[name], np.asarray(params[name])[np.ix_(*kept)])
    size = sum(leaf.size for leaf in small.values())
    assert graph.cost(names).parameters == pruner.plan(params).kept == size
    for tree in (masks, zeroed):
        found = {name: kept.tolist() for name, kept in graph.nonzero_channels(tree).items()}
        assert found == names
    found = graph.small_apply(names)(small, X)
    np.testing.assert_allclose(found, model.apply(zeroed, X), rtol=1e-4, atol=1e-4)
    tx = optax.chain(optax.sgd(0.0), group_lasso(graph, 0.5))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    shrunk = optax.apply_updates(params, updates)
    for name, factor in factors.items():
        np.testing.assert_allclose(shrunk[name], params[name] * factor, rtol=1e-4, atol=1e-6)
