"""Random values for models that are given as shapes."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree


def values_like(params, inputs, seed=0):
    """Parameters and inputs of these shapes: normal numbers, positive ones for variances, small whole numbers."""
    rng = np.random.default_rng(seed)
    paths, leaves, treedef = tree.flatten_with_paths(params)
    values = []
    for path, leaf in zip(paths, leaves, strict=True):
        is_variance = 'var' in tree.path_string(path) or path == ('2', '1', '1')
        values.append(_draw(rng, leaf, is_variance))
    inputs = jax.tree.map(lambda leaf: _draw(rng, leaf), inputs)
    return jax.tree.unflatten(treedef, values), inputs


def _draw(rng, leaf, is_variance=False):
    is_abstract = not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, jax.core.Tracer)
    if not is_abstract and not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    if is_variance:
        return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)
