"""What calibration finds out about the inputs of a weight matrix."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import caller_warnings
from jaxpruner import tree as tree_lib

_MOST_NAMED = 5  # leaves in a warning


class InputStatistics(NamedTuple):
    """Sums over samples of the inputs that a leaf's weight matrices meet. Leading axes are those of the matrices.

    Attributes:
      count: number of samples, or the sum of their weights; a scalar, or one for each of the layers that a loop goes
        through.
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
    """Refuses statistics that do not fit matrices `[..., inputs, outputs]`, lack a Gram matrix, or are not finite."""
    inputs = shape[-2]
    expected = {'second_moment': tuple(shape[:-1])}
    if statistics.gram is not None:
        expected['gram'] = (*shape[:-1], inputs)
    elif needs_gram:
        raise ValueError(f"{where}: its statistics hold no Gram matrix; calibrate with kind='gram'")
    for name, expected_shape in expected.items():
        given_shape = tuple(getattr(statistics, name).shape)
        if given_shape != expected_shape:
            raise ValueError(
                f'{where}: {name} has shape {given_shape}, and weight matrices of shape {tuple(shape)} need '
                f'{expected_shape}'
            )
    is_finite = tree_lib.is_traced(statistics.count) or _is_finite(statistics.second_moment)
    if not is_finite:
        raise ValueError(
            f'{where}: its inputs are not finite; look for NaN or inf in the batches and in the model'
        )


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


class TooFewSamples(NamedTuple):
    """A leaf whose inputs were seen less often than there are inputs."""

    where: str
    samples: float
    inputs: int


def too_few_samples(
    statistics: InputStatistics, shape: tuple[int, ...], where: str
) -> TooFewSamples | None:
    """Makes a record if matrices `[..., inputs, outputs]` have more inputs than samples, else `None`."""
    if tree_lib.is_traced(statistics.count):
        return None
    counts = np.asarray(statistics.count, np.float64)
    # Of matrices that no sample reached another warning tells.
    samples = float(np.min(counts[counts > 0], initial=np.inf))
    inputs = shape[-2]
    return TooFewSamples(where, samples, inputs) if samples < inputs else None


def warn_of_few_samples(leaves: Sequence[TooFewSamples]) -> None:
    """Warns once of all leaves."""
    if not leaves:
        return
    names = [f'{leaf.where} ({leaf.samples:g} samples, {leaf.inputs} inputs)' for leaf in leaves]
    times = max(math.ceil(leaf.inputs / leaf.samples) for leaf in leaves)
    caller_warnings.warn(
        f'samples are fewer than inputs, so that what they say of these is uncertain: {first_names(names)}; calibrate '
        f'with at least {times} times the number of samples'
    )


def first_names(names: Sequence[str]) -> str:
    """Lists the first names of a warning, and how many more there are."""
    more = f' and {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''
    return ', '.join(names[:_MOST_NAMED]) + more
