"""Groups whose channels lie several times along one axis: as factors (h ⊗ h), as segments (h, h), or as both."""

import itertools
import math
import string

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

    def graph(self):
        return channel_groups(self.apply, self.params, X)

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


@st.composite
def models(draw):
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=2))
    word = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3)
    words = draw(st.lists(word, min_size=1, max_size=2))
    return Model(sizes, words, draw(st.tuples(*[st.booleans() for _ in sizes])))


BILINEAR = Model([4], [[0, 0]], [False])
TABLE = {
    'bilinear': BILINEAR,
    'flat square': Model([3], [[0]], [True]),
    'cubes beside': Model([3, 2], [[0, 0, 0], [1, 0], [0]], [True, False]),
    'around': Model([2, 3], [[0, 1, 0]], [False, True]),
}


@settings(max_examples=15)
@given(models(), st.data())
def test_what_is_cut_and_zeroed_and_counted_is_what_has_a_removed_channel(model, data):
    graph = model.graph()
    keep, names = {}, {}
    for i in sorted({i for word in model.words for i in word}):
        group = model.group_of(graph, i)
        assert group.exact
        flags = model.weights_with(i)
        assert group.parameters == sum(int(flags[name].sum()) for name in flags)
        some = st.lists(st.integers(0, model.sizes[i] - 1), min_size=1, unique=True)
        keep[i] = sorted(data.draw(some))
        names[group.name] = keep[i]
    zeroed, small = graph.zeroed(model.params, names), graph.shrink(model.params, names)
    for name, kept in model.kept_positions(keep).items():
        expected = np.asarray(model.params[name])[np.ix_(*kept)]
        np.testing.assert_array_equal(small[name], expected)
        inside = np.zeros_like(model.params[name])
        inside[np.ix_(*kept)] = expected
        np.testing.assert_array_equal(zeroed[name], inside)
    found = graph.small_apply(names)(small, X)
    np.testing.assert_allclose(found, model.apply(zeroed, X), rtol=1e-4, atol=1e-4)
    assert graph.cost(names).parameters == sum(leaf.size for leaf in small.values())
    assert {name: kept.tolist() for name, kept in graph.nonzero_channels(zeroed).items()} == {
        name: kept for name, kept in names.items() if len(kept) < graph.groups[name].size
    }


@pytest.mark.parametrize('model', TABLE.values(), ids=TABLE)
def test_each_weight_counts_once_for_each_of_its_channels(model):
    """The scores of a ranking in training, and the norms of a group lasso."""
    graph, params = model.graph(), model.params
    keep, names = {}, {}
    factors = {name: np.ones(leaf.shape) for name, leaf in params.items()}
    for i, size in enumerate(model.sizes):
        scores, counts = np.zeros(size), np.zeros(size)
        norms = np.zeros(size)
        for channel in range(size):
            for name, flags in model.weights_with(i, channel).items():
                weights = np.asarray(params[name])[flags]
                scores[channel] += np.abs(weights).sum()
                norms[channel] += (weights**2).sum()
                counts[channel] += flags.sum()
        keep[i] = np.sort(np.argsort(-scores)[: round(size / 2)])
        names[model.group_of(graph, i).name] = keep[i].tolist()
        shrinkage = np.maximum(0, 1 - 0.5 * np.sqrt(counts) / np.sqrt(norms))
        for channel in range(size):
            for name, flags in model.weights_with(i, channel).items():
                factors[name][flags] *= shrinkage[channel]
    pruner = jaxpruner.MagnitudePruning(sparsity_type=GroupedChannels(graph), sparsity=0.5)
    pruned, masks = pruner.instant_sparsify(params)
    for name, kept in model.kept_positions(keep).items():
        expected = np.zeros(params[name].shape)
        expected[np.ix_(*kept)] = 1
        np.testing.assert_array_equal(masks[name], expected)
    found = {name: kept.tolist() for name, kept in graph.nonzero_channels(masks).items()}
    assert found == names
    assert pruner.plan(params).kept == sum(
        math.prod(map(len, k)) for k in model.kept_positions(keep).values()
    )
    np.testing.assert_allclose(
        graph.small_apply(names)(graph.shrink(params, names), X),
        model.apply(pruned, X),
        rtol=1e-4,
        atol=1e-4,
    )
    tx = optax.chain(optax.sgd(0.0), group_lasso(graph, 0.5))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    shrunk = optax.apply_updates(params, updates)
    for name, factor in factors.items():
        np.testing.assert_allclose(shrunk[name], params[name] * factor, rtol=1e-4, atol=1e-6)
