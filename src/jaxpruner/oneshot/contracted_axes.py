"""Which axes of the weights and of the data a contraction sums over."""

from typing import Any, NamedTuple

from jaxpruner.trace import contractions


class Contracted(NamedTuple):
    """The axes that a contraction sums over and shares, of the weights and of the data in the same order."""

    of_weights: tuple[int, ...]
    batch_of_weights: tuple[int, ...]
    of_data: tuple[int, ...]
    batch_of_data: tuple[int, ...]

    @property
    def summed_or_shared(self) -> set[int]:
        """The axes of the weights that are not outputs."""
        return {*self.of_weights, *self.batch_of_weights}


def contracted_axes(equation: Any, operand: int) -> Contracted:
    """Finds the axes of a contraction whose operand number `operand` is the weights.

    Inputs are counted in the order of the weights' axes, and in kernels of convolutions by height, width and channels,
    so that N:M groups lie along the channels. The data of a convolution have windows instead of axes.

    >>> import jax, jax.numpy as jnp
    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> contracted_axes(equation, operand=1)
    Contracted(of_weights=(0,), batch_of_weights=(), of_data=(1,), batch_of_data=())
    """
    if equation.primitive.name == 'conv_general_dilated':
        inputs = contractions.input_axes(equation, operand)
        return Contracted(inputs, (), (), ())
    contract, batch, _ = contractions.dot_axes(equation)
    data = 1 - operand
    pairs = sorted(zip(contract[operand], contract[data], strict=True))
    of_weights = tuple(weights_axis for weights_axis, _ in pairs)
    of_data = tuple(data_axis for _, data_axis in pairs)
    # With the axis of groups, which data do not have.
    batch_of_weights = contractions.roles(equation, operand).batch
    return Contracted(of_weights, batch_of_weights, of_data, batch[data])
