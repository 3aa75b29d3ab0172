"""Which weight matrices meet the same value: they share the statistics of their inputs."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax

from jaxpruner.oneshot import moments
from jaxpruner.oneshot.contracted_axes import contracted_axes
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.sample_weights import sample_axes
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.trace import Use
from jaxpruner.trace.taps import Taps


def inputs_key(matrices: WeightMatrices) -> Hashable:
    """Tells what the statistics of the inputs depend on; valid within one trace of the model."""
    return tuple(map(_value_key, matrices.uses))


def uses_by_inputs(matrices: Iterable[WeightMatrices]) -> dict[Hashable, tuple[Use, ...]]:
    """Lists the uses that meet each value, in the order in which the values come first."""
    uses: dict[Hashable, tuple[Use, ...]] = {}
    for part in matrices:
        uses.setdefault(inputs_key(part), part.uses)
    return uses


def check_alike(first: Sequence[WeightMatrices], other: Sequence[WeightMatrices]) -> None:
    """Refuses a model that uses its leaves in another way when its inputs have another shape.

    Raises:
      ValueError: leaves are read in other ways, or other leaves meet the same value.
    """
    if _sharing(first) != _sharing(other):
        raise ValueError(
            'with batches of different shapes the model uses its leaves in different ways, or other leaves meet the '
            'same value, so that their statistics cannot be added up; give batches of one shape'
        )


def input_taps(values: Iterable[Sequence[Use]], with_gram: bool) -> Taps:
    """Takes the statistics of each value from one of the uses that meet it; a run may say how much samples count."""

    def statistic(
        use: Use, operands: list[jax.Array], sample_weights: jax.Array | None = None
    ) -> InputStatistics:
        data = operands[1 - use.site.operand]
        sizes = operands[2] if len(operands) > 2 else None
        axes = ()
        if sample_weights is not None:
            (axes,) = sample_axes(use, sample_weights.shape)
        return moments.statistics_of(
            use.site.equation, use.site.operand, data, with_gram, sizes, sample_weights, axes
        )

    return Taps(list(values), statistic)


def _sharing(matrices: Sequence[WeightMatrices]) -> list[Any]:
    """Tells how each leaf is read and the number of the value it meets: the same in each trace of a model."""
    numbers: dict[Hashable, int] = {}
    sharing = []
    for part in matrices:
        number = numbers.setdefault(inputs_key(part), len(numbers))
        sharing.append((part.path, part.reading, number))
    return sharing


def _value_key(use: Use) -> Hashable:
    site = use.site
    equation = site.equation
    data = equation.invars[1 - site.operand]
    program = site.path[:-1]
    loops = tuple(axis.loop for axis in site.view.stack)
    if use.op == 'dot':
        group_sizes = tuple(map(id, equation.invars[2:]))
        _, _, *data_axes = contracted_axes(equation, site.operand)
        return program, id(data), group_sizes, tuple(data_axes), loops
    settings = dict(equation.params)
    settings.pop('precision', None)
    kernel_axes = equation.params['dimension_numbers'].rhs_spec[1:]
    kernel_shape = equation.invars[1].aval.shape
    window_and_channels = tuple(kernel_shape[axis] for axis in kernel_axes)
    return program, id(data), str(settings), window_and_channels, loops
