"""What calibration finds out about the inputs of a weight matrix."""

import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib


class InputStatistics(NamedTuple):
    """Sums over samples of the inputs that a leaf's weight matrices meet. Leading axes are those of the matrices.

    Attributes:
      count: number of samples, a scalar, or one for each of the layers that a loop goes through.
      second_moment: sum of squares of each input, `[..., inputs]`.
      gram: sum of products of each two inputs, `[..., inputs, inputs]`; `None` where it was not asked for.

    >>> inputs = jnp.array([[1.0, 2.0], [0.0, 2.0], [1.0, 0.0]])
    >>> InputStatistics(3, jnp.sum(inputs**2, 0), inputs.T @ inputs).second_moment.tolist()
    [2.0, 8.0]
    """

    count: jax.Array | int
    second_moment: jax.Array
    gram: jax.Array | None = None


def check_statistics(statistics: InputStatistics, shape: tuple[int, ...], where: str, needs_gram: bool = False) -> None:
    """Refuses statistics that do not belong to a leaf's matrices, and warns of too few samples.

    Args:
      statistics: the leaf's.
      shape: of its matrices, `[..., inputs, outputs]`.
      where: the leaf's path, for the messages.
      needs_gram: whether its Gram matrix is used.

    Raises:
      ValueError: a shape is another, the Gram matrix is missing, or inputs are not finite.

    >>> check_statistics(InputStatistics(9, jnp.ones(4)), (4, 2), 'dense/kernel')
    """
    inputs = shape[-2]
    expected = {'second_moment': shape[:-1], 'gram': (*shape[:-1], inputs)}
    for name, wanted in expected.items():
        array = getattr(statistics, name)
        if array is None:
            if needs_gram and name == 'gram':
                raise ValueError(f"{where}: its statistics hold no Gram matrix; calibrate with kind='gram'")
        elif tuple(array.shape) != tuple(wanted):
            raise ValueError(
                f'{where}: {name} has shape {tuple(array.shape)}, and weight matrices of shape {tuple(shape)} need '
                f'{tuple(wanted)}'
            )
    if tree_lib.is_traced(statistics.count):
        return
    if not jnp.isfinite(statistics.second_moment).all():
        raise ValueError(f'{where}: its inputs are not finite; look for NaN or inf in the batches and in the model')
    count = int(np.min(statistics.count))
    if count < inputs:
        warnings.warn(
            f'{where}: {count} samples are fewer than its {inputs} inputs, so that what they say of these is '
            f'uncertain; calibrate with at least {math.ceil(inputs / max(count, 1))} times as many',
            UserWarning,
            stacklevel=3,
        )
