"""How much each sample of a batch counts in statistics: padding, for one, counts nothing.

Weights have the shape of the leading axes of a model's inputs, such as `(batch, length)`. The inputs of a product must
have these axes side by side and in this order, among those that are neither summed over nor shared with the weight
matrices; or one axis that all of them are flattened into. A convolution takes one weight for each image. Axes are told
apart by their lengths alone. A product that leaves no place for the weights, or several, is refused: pooled inputs have
no positions any more, and rows that are sorted by experts have others.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.matrices import WeightMatrices
from jaxpruner.trace import Use, contractions

# A batch -> how much each of its samples counts.
SampleWeights = Callable[[Any], Any]


def weights_of(batch: Any, weights: SampleWeights | None) -> jax.Array | None:
    """Calls the function that a user gave; returns float32.

    Raises:
      TypeError: it is no function.
      ValueError: a weight is negative or not finite.
    """
    if weights is None:
        return None
    if not callable(weights):
        raise TypeError(
            "weights is a function of a batch, such as weights=lambda batch: batch['mask']; got "
            f'{type(weights).__name__}'
        )
    array = jnp.asarray(weights(batch), jnp.float32)
    if not bool(jnp.all(jnp.isfinite(array) & (array >= 0))):
        raise ValueError('weights must be finite and not negative; 0 leaves a sample out')
    return array


def check_samples_are_told(matrices: Iterable[WeightMatrices], weights: jax.Array | None) -> None:
    """Refuses all leaves of whose inputs it is not clear which sample has which weight.

    Raises:
      ValueError: there is such a leaf.
    """
    if weights is None:
        return
    refused = {}
    for part in matrices:
        for use in part.uses:
            if len(sample_axes(use, weights.shape)) != 1:
                shape = use.site.equation.invars[1 - use.site.operand].aval.shape
                refused[tree_lib.path_string(part.path)] = f'inputs {shape} at {use.where}'
    if refused:
        dense = ', '.join(f'{name!r}: None' for name in refused)
        reasons = '; '.join(f'{name}: {reason}' for name, reason in refused.items())
        raise ValueError(
            f'weights of shape {weights.shape} do not tell how much each sample of these leaves counts: {reasons}. '
            'Inputs need these axes side by side, or flattened into one, and a convolution has one weight for each '
            'image; rows that are sorted by experts have none. Where lengths coincide give batches of another size. Or '
            f"leave the leaves dense: sparsity_type={{{dense}, '*': …}}"
        )


def weigh(data: jax.Array, weights: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Scales the inputs of a product by the roots of the weights, so that their squares are weighed.

    `axes` are those of the samples. A sample of weight 0 becomes zero, even if it is NaN.

    >>> weigh(jnp.array([[1.0, 2.0], [jnp.nan, 4.0]]), jnp.array([4.0, 0.0]), [0]).tolist()
    [[2.0, 4.0], [0.0, 0.0]]
    """
    weights = weights.reshape(
        [data.shape[axis] if axis in axes else 1 for axis in range(data.ndim)]
    )
    return jnp.where(weights == 0, 0, data * jnp.sqrt(weights).astype(data.dtype))


def sample_axes(use: Use, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lists the places where the inputs of a product may have the axes of weights of this shape."""
    equation, operand = use.site.equation, 1 - use.site.operand
    lengths = equation.invars[operand].aval.shape
    if use.op == 'conv':
        images = equation.params['dimension_numbers'].lhs_spec[0]
        return [(images,)] if shape == (lengths[images],) else []
    if equation.primitive.name in contractions.RAGGED:
        return []
    roles = contractions.roles(equation, operand)
    flattened = [(math.prod(shape),)] if len(shape) > 1 and not roles.batch else []
    for own_shape in (shape, *flattened):
        starts = range(len(roles.free) - len(own_shape) + 1)
        places = [roles.free[start : start + len(own_shape)] for start in starts]
        places = [axes for axes in places if tuple(lengths[axis] for axis in axes) == own_shape]
        if places:
            return places
    return []
