"""SynFlow: a weight counts by what flows through it, in a model of magnitudes that is fed with ones."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners
from jaxpruner.oneshot.batches import as_inputs, first_batch
from jaxpruner.oneshot.pruning_at_initialization import LossFn, PruningAtInitialization


@dataclasses.dataclass
class SynFlow(PruningAtInitialization):
    r"""Keeps the weights with the largest $|w \cdot \partial R / \partial w|$, and needs no data.

    $R$ is the sum of the outputs when all parameters are replaced by their magnitudes, and all inputs by ones: of the
    batches only the first one's shapes and dtypes are used, which `jax.ShapeDtypeStruct` can give. Whole numbers are
    ones, too. Apply the model as in evaluation: without dropout, and with constant statistics in batch norm. Where $R$
    exceeds float32, as in deep models, an error says so. From Tanaka et al., "Pruning neural networks without any data
    by iteratively conserving synaptic flow", 2020.

    >>> params = {'in': jnp.array([[3.0, -2.0]]), 'out': jnp.array([[-1.0], [4.0]])}  # 3 x 1 here, 2 x 4 there
    >>> pruner = SynFlow(sparsity_distribution_fn=lambda params: {'in': 0.5, 'out': 0.5})
    >>> apply_fn = lambda params, x: x @ params['in'] @ params['out']
    >>> _, masks = pruner.instant_sparsify(params, apply_fn=apply_fn, batches=[jnp.zeros((1, 1))])
    >>> masks['in'].tolist(), masks['out'].tolist()
    ([[0, 1]], [[0], [1]])
    """

    function: ClassVar[str] = 'apply_fn'

    rounds: int = 100

    def as_loss(
        self, function: Callable[..., Any], batches: Iterable[Any]
    ) -> tuple[LossFn, Iterable[Any]]:
        """Returns the flow, and one batch of ones."""

        def flow(params: Any, *inputs: Any) -> Any:
            magnitudes = jax.tree.map(_magnitude, params)
            results = jax.tree.leaves(function(magnitudes, *inputs))
            total = 0
            for result in filter(_is_float, results):
                dtype = tree_lib.at_least_float32(result.dtype)
                total += jnp.sum(result, dtype=dtype)
            return total

        first, _ = first_batch(batches)
        inputs = as_inputs(first)
        for leaf in jax.tree.leaves(inputs):
            if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
                raise ValueError(
                    'batches tell SynFlow the shapes of the inputs, by arrays or jax.ShapeDtypeStruct(shape, dtype); '
                    f'got {leaf!r}'
                )

        def ones_like(leaf: Any) -> jax.Array:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jnp.ones(leaf.shape, dtype)

        return flow, [jax.tree.map(ones_like, inputs)]

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Multiplies weights by derivatives of the flow."""
        del sparse_state
        return pruners.saliencies(params, grads)


def _magnitude(leaf: Any) -> Any:
    return jnp.abs(leaf) if _is_float(leaf) else leaf


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, 'dtype') and jnp.issubdtype(leaf.dtype, jnp.inexact)
