"""A few steps of training with gradients that are given."""

import jax
import numpy as np
import optax

import jaxpruner
from jaxpruner import tree


def history(pruner, steps, params, grads=None, tx=None, **extra):
    """Parameters and optimizer state before the first step, with the masks applied, and after each step.

    Args:
      pruner: wraps the optimizer.
      steps: how many.
      params: at first.
      grads: the same in each step; by default the cosine of the parameters.
      tx: the optimizer; by default SGD with momentum.
      **extra: for `update`.
    """
    tx = pruner.wrap_optax(tx or optax.sgd(0.1, momentum=0.9))
    state, update = tx.init(params), jax.jit(tx.update)
    params = pruner.post_gradient_update(params, state)
    states = [(params, state)]
    for _ in range(steps):
        given = jax.tree.map(jax.numpy.cos, params) if grads is None else grads
        updates, state = update(given, state, params, **extra)
        params = optax.apply_updates(params, updates)
        states.append((params, state))
    return states


def masks(state, params):
    """Masks of a state by name, unpacked, as NumPy arrays; `None` where a leaf is dense."""
    (found,) = jaxpruner.sparse_states(state)
    unpacked = jaxpruner.unpack_masks(found.masks, params)
    paths, leaves, _ = tree.flatten_with_paths(unpacked, is_leaf=lambda node: node is None)
    return {
        '/'.join(path): mask if mask is None else np.asarray(mask)
        for path, mask in zip(paths, leaves, strict=True)
    }


def assert_equal(found, expected):
    """Two trees of arrays are equal, with the same nodes."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)
