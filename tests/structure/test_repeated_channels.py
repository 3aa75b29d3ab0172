"""Groups whose channels lie several times along one axis: as factors (h ⊗ h), as segments (h, h), or as both."""

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
    """

    def __init__(self, sizes, words, has_squares):
        self.sizes, self.words, self.has_squares = sizes, words, has_squares
        rng = np.random.default_rng(1)
        everything = self.weights_of([np.ones(size) for size in sizes])
        self.params = {
            name: jnp.asarray(rng.normal(size=flags.shape), jnp.float32)
            for name, flags in everything.items()
        }

    def products(self, hidden):
        """Of values [rows, channels], side by side."""
        parts = []
        for first, *others in self.words:
            product = hidden[first]
            for i in others:
                product = jnp.einsum('za,zb->zab', product, hidden[i]).reshape(len(product), -1)
            parts.append(product)
        return jnp.concatenate(parts, -1)

    def apply(self, params, x):
        hidden = []
        for i, size in enumerate(self.sizes):
            h = jnp.tanh(x @ params[f'up{i}'])
            if self.has_squares[i]:
                h = h + h @ params[f'square{i}'].reshape(size, size)
            hidden.append(h)
        return self.products(hidden) @ params['out']

    def weights_of(self, channels):
        """Leaf -> flags of the weights of which all channels are flagged, by hidden value."""
        rows = [np.asarray(each)[None] for each in channels]
        flags = {'out': np.asarray(self.products(rows)).T * np.ones(2)}
        for i, row in enumerate(rows):
            flags[f'up{i}'] = np.ones((3, 1)) * row
            if self.has_squares[i]:
                flags[f'square{i}'] = (row.T * row).ravel()
        return {name: each > 0 for name, each in flags.items()}

    def weights_with(self, i, channels):
        """Leaf -> flags of the weights that lie in any of these channels of hidden value i."""
        others = [np.ones(size) for size in self.sizes]
        others[i][channels] = 0
        return {name: ~flags for name, flags in self.weights_of(others).items()}


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
    names, stays = {}, [np.zeros(size) for size in model.sizes]
    factors = {name: np.ones(leaf.shape) for name, leaf in params.items()}
    for i, size in enumerate(model.sizes):
        (group,) = [each for each in graph.groups.values() if f'up{i}' in each.name]
        assert group.exact
        assert group.parameters == sum(
            int(flags.sum()) for flags in model.weights_with(i, range(size)).values()
        )
        scores = np.zeros(size)
        for channel in range(size):
            flags = model.weights_with(i, channel)
            weights = np.concatenate([np.asarray(params[name])[flags[name]] for name in flags])
            scores[channel] = np.abs(weights).sum()
            shrinkage = max(0, 1 - 0.5 * np.sqrt(weights.size / (weights**2).sum()))
            for name in flags:
                factors[name][flags[name]] *= shrinkage
        kept = np.sort(np.argsort(-scores)[: round(size / 2)])
        stays[i][kept], names[group.name] = 1, kept.tolist()
    pruner = jaxpruner.MagnitudePruning(sparsity_type=GroupedChannels(graph), sparsity=0.5)
    pruned, masks = pruner.instant_sparsify(params)
    zeroed, small = graph.zeroed(params, names), graph.shrink(params, names)
    for name, flags in model.weights_of(stays).items():
        np.testing.assert_array_equal(masks[name], flags)
        np.testing.assert_array_equal(zeroed[name], params[name] * flags)
        np.testing.assert_array_equal(pruned[name], zeroed[name])
        np.testing.assert_array_equal(small[name].ravel(), np.asarray(params[name])[flags])
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
