"""What calibration finds out about the inputs of a weight matrix."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import caller_warnings
from jaxpruner.core import tree as tree_lib

_MOST_NAMED = 5  # leaves in a warning


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


def check_statistics(
    statistics: InputStatistics, shape: tuple[int, ...], where: str, needs_gram: bool = False
) -> None:
    """Refuses statistics that do not belong to a leaf's matrices, or that are not finite.

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
                raise ValueError(
                    f"{where}: its statistics hold no Gram matrix; calibrate with kind='gram'"
                )
        elif tuple(array.shape) != tuple(wanted):
            raise ValueError(
                f'{where}: {name} has shape {tuple(array.shape)}, and weight matrices of shape {tuple(shape)} need '
                f'{tuple(wanted)}'
            )
    if (
        not tree_lib.is_traced(statistics.count)
        and not jnp.isfinite(statistics.second_moment).all()
    ):
        raise ValueError(
            f'{where}: its inputs are not finite; look for NaN or inf in the batches and in the model'
        )


class TooFewSamples(NamedTuple):
    """A leaf whose inputs were seen less often than there are inputs.

    >>> TooFewSamples('w', 2, 6).inputs
    6
    """

    where: str
    samples: int
    inputs: int


def too_few_samples(
    statistics: InputStatistics, shape: tuple[int, ...], where: str
) -> TooFewSamples | None:
    """Says so where a leaf's matrices have more inputs than samples.

    Args:
      statistics: the leaf's.
      shape: of its matrices, `[..., inputs, outputs]`.
      where: the leaf's path.

    >>> too_few_samples(InputStatistics(3, jnp.ones(4)), (4, 2), 'dense/kernel')
    TooFewSamples(where='dense/kernel', samples=3, inputs=4)
    """
    if tree_lib.is_traced(statistics.count):
        return None
    samples, inputs = int(np.min(statistics.count)), shape[-2]
    return TooFewSamples(where, samples, inputs) if samples < inputs else None


def warn_of_few_samples(leaves: Sequence[TooFewSamples]) -> None:
    """One warning for all leaves.

    Args:
      leaves: those with more inputs than samples, if there are any.

    >>> warn_of_few_samples([])
    """
    if not leaves:
        return
    messages = []
    few = [leaf for leaf in leaves if leaf.samples]
    unseen = [leaf for leaf in leaves if not leaf.samples]
    if few:
        times = max(math.ceil(leaf.inputs / leaf.samples) for leaf in few)
        messages.append(
            f'samples are fewer than inputs, so that what they say of these is uncertain: {_names(few)}; calibrate '
            f'with at least {times} times as many'
        )
    if unseen:
        messages.append(
            f'no sample reached some matrices of these, where it is arbitrary which weights go: {_names(unseen)}; give '
            'batches that reach them, or leave the leaves dense'
        )
    caller_warnings.warn('. '.join(messages))


def _names(leaves: Sequence[TooFewSamples]) -> str:
    named = [
        f'{leaf.where} ({leaf.samples} samples, {leaf.inputs} inputs)'
        for leaf in leaves[:_MOST_NAMED]
    ]
    more = f' and {len(leaves) - _MOST_NAMED} more' if len(leaves) > _MOST_NAMED else ''
    return ', '.join(named) + more
