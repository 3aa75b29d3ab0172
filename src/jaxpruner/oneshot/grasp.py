"""GraSP: a weight counts by how much of the gradient's norm goes when it is taken away, before any training."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.pruning_at_initialization import LossFn, PruningAtInitialization, gradients


def hessian_product(
    loss: LossFn, weights: tree_lib.PyTree, direction: tree_lib.PyTree
) -> tree_lib.PyTree:
    """Multiplies the Hessian of a loss by a vector, which is a tree like the weights, as the result is.

    >>> import jax.numpy as jnp
    >>> float(hessian_product(lambda weight: weight**3, jnp.float32(2), jnp.float32(10)))  # the second derivative is 12
    120.0
    """

    def cast(vector: jax.Array, weight: jax.Array) -> jax.Array:
        # JAX's gradient of a complex weight is the conjugate of the direction of steepest ascent.
        return jnp.conj(vector).astype(weight.dtype)

    tangents = jax.tree.map(cast, direction, weights)
    _, product = jax.jvp(jax.grad(loss), (weights,), (tangents,))
    return product


@dataclasses.dataclass
class GraSP(PruningAtInitialization):
    r"""Keeps the gradient flow: weights with the largest $w \cdot H g$ stay.

    Without weight $w_i$ the gradient's squared norm changes by $-2 w_i (H g)_i$ to first order: those whose removal
    makes it grow most go first. $g$ and $H$ are derivatives with respect to the leaves that are pruned, each summed
    over the batches, which are read twice in a round. From Wang et al., "Picking Winning Tickets Before Training by
    Preserving Gradient Flow", 2020, whose code divides logits by a temperature of 200: that belongs into the loss.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.array([[1.0, 1.0, 1.0]])}
    >>> pruner = GraSP(sparsity_distribution_fn=lambda params: {'w': 2 / 3})
    >>> loss_fn = lambda params, x: jnp.sum((params['w'] - x) ** 2)  # gradients are -2, 1 and -4: the second shrinks
    >>> pruner.instant_sparsify(params, loss_fn=loss_fn, batches=[jnp.array([2.0, 0.5, 3.0])])[1]['w'].tolist()
    [[0, 1, 0]]
    """

    passes: ClassVar = (gradients, hessian_product)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Multiplies weights by the Hessian's product with the gradient, which comes as `grads`."""
        del sparse_state

        def score(weight: jax.Array, product: jax.Array) -> jax.Array:
            return jnp.real(weight.astype(product.dtype) * product)

        return jax.tree.map(score, params, grads)
