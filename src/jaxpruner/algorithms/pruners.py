"""Pruning by a score of each single weight: magnitude, saliency, chance."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import control, seeds, selection
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater as BaseUpdater
from jaxpruner.tree import PyTree, at_least_float32


def generate_random_scores(params: PyTree, rng_seed: Any) -> PyTree:
    """Draws uniform scores in [0, 1), one key a leaf.

    Args:
      params: any pytree of arrays.
      rng_seed: whole number, uint32 key or typed key.

    Returns:
      A tree like the parameters, in their shapes; float64 where they are, else float32, which knows few ties.

    >>> generate_random_scores({'w': jnp.ones(2)}, 8)['w'].shape
    (2,)
    """
    leaves, treedef = jax.tree.flatten(params)
    keys = seeds.split_key(seeds.prng_key(rng_seed), len(leaves))

    def uniform_like(key, leaf):
        dtype = leaf.dtype if leaf.dtype == jnp.float64 else jnp.dtype('float32')
        if tree_lib.has_traced((key, leaf)):
            draw = functools.partial(jax.random.uniform, shape=leaf.shape, dtype=dtype)
            return control.draw_in_loop(draw, key)
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            return _uniform_on_devices(leaf.shape, dtype, leaf.sharding)(key)
        return jax.random.uniform(key, leaf.shape, dtype)

    return jax.tree.unflatten(treedef, map(uniform_like, keys, leaves))


@functools.lru_cache
def _uniform_on_devices(shape, dtype, sharding):
    """Compiles the function that draws on each device what it holds of a leaf."""
    draw = functools.partial(jax.random.uniform, shape=shape, dtype=dtype)
    return jax.jit(draw, out_shardings=sharding)


def magnitudes(params: PyTree) -> PyTree:
    """Computes the absolute value of each weight; `None` for leaves that are no arrays of numbers, such as random keys.

    >>> magnitudes({'w': jnp.array([-2.0, 1.0])})
    {'w': Array([2., 1.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(params)
    scores = [
        jnp.abs(leaf) if jnp.issubdtype(getattr(leaf, 'dtype', bool), jnp.number) else None
        for leaf in leaves
    ]
    return tree_lib.unflatten(treedef, scores, leaves)


def saliencies(params: PyTree, grads: PyTree | None) -> PyTree:
    r"""Computes $|w \cdot \partial L / \partial w|$, the first-order change of the loss when the weight is removed.

    Raises:
      ValueError: there are no gradients.

    >>> saliencies({'w': jnp.array([-2.0, 1.0])}, {'w': jnp.array([0.5, 3.0])})
    {'w': Array([1., 3.], dtype=float32)}
    """
    if grads is None:
        raise ValueError(
            'saliency scores need gradients; pass them: pruner.instant_sparsify(params, grads), or let SNIP take them: '
            "jaxpruner.prune(params, sparsity, 'snip', loss_fn=…, batches=…)"
        )

    def saliency(param, grad):
        is_number = jnp.issubdtype(param.dtype, jnp.number)
        if grad is None or grad.dtype == jax.dtypes.float0 or not is_number:
            return None
        # Products of 16-bit numbers would vanish.
        weights = param.astype(at_least_float32(param.dtype))
        return jnp.abs(weights * grad.astype(at_least_float32(grad.dtype)))

    return tree_lib.map_with_missing(saliency, params, grads)


@dataclasses.dataclass
class MagnitudePruning(BaseUpdater):
    """Removes the weights of least magnitude. Zhu and Gupta, "To prune, or not to prune", 2017.

    >>> pruner = MagnitudePruning(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> pruner.instant_sparsify({'w': jnp.array([-2.0, 1.0])})[0]
    {'w': Array([-2.,  0.], dtype=float32)}
    """

    @selection.says(of_each_weight=jnp.abs)
    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores weights by magnitude."""
        del sparse_state, grads
        return magnitudes(params)


@dataclasses.dataclass
class SaliencyPruning(BaseUpdater):
    """Removes the weights whose removal changes the loss least, to first order. Molchanov et al., 2016.

    >>> pruner = SaliencyPruning(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> pruner.instant_sparsify({'w': jnp.array([-2.0, 1.0])}, {'w': jnp.array([0.5, 3.0])})[0]
    {'w': Array([0., 1.], dtype=float32)}
    """

    needs_gradients: ClassVar[bool] = True

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores weights by saliency."""
        del sparse_state
        return saliencies(params, grads)


@dataclasses.dataclass
class RandomPruning(BaseUpdater):
    """Removes weights at random: the baseline for every other score.

    Each update draws anew which of the remaining weights go. Pruned weights stay pruned.

    >>> pruner = RandomPruning(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> int(pruner.instant_sparsify({'w': jnp.ones(8)})[1]['w'].sum())
    4
    """

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Draws scores from the seed and the step; pruned weights score below all others, and stay pruned."""
        del grads
        if sparse_state is None:
            return generate_random_scores(params, self.rng_seed)
        scores = generate_random_scores(params, seeds.prng_key(self.rng_seed, sparse_state.count))
        return tree_lib.map_with_missing(
            lambda s, m: s if m is None else jnp.where(m, s, -1), scores, sparse_state.masks
        )
