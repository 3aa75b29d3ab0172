"""One product of a program: data become rows, an operator multiplies them, and its results become the program's."""

import contextlib
import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.oneshot.matrices import CASTS, contracted_axes, step_name
from jaxpruner.sparse.program.convolutions import Convolution
from jaxpruner.trace import Use
from jaxpruner.trace.program import bind


class Operator(Protocol):
    """What stands in the place of a leaf: a pytree whose arrays have the layers of the leaf in front.

    An operator may also have `convolve(image, convolution)`, which maps `[batch, *space, channels]` to `[batch, *space,
    outputs]`; otherwise the windows of an image are gathered into rows.
    """

    def multiply(self, rows: jax.Array, result_dtype: Any) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`, inside the model, for one layer.

        Products are added up in another type than that of the operands where a program asks for it with
        `preferred_element_type`: int32 for products of int8, or float32 for those of bfloat16.
        """
        ...


class ProductSite(NamedTuple):
    """Where a program multiplies data by a matrix.

    Attributes:
      use: the use of the leaf.
      part: the number of the part of the leaf; `None` if the leaf is read as a whole.
    """

    use: Use
    part: int | None = None

    @property
    def equation(self) -> Any:
        """The operation."""
        return self.use.site.equation

    @property
    def operand(self) -> int:
        """Which of its operands holds the weights."""
        return self.use.site.operand

    @property
    def op(self) -> str:
        """`'dot'`, `'1x1 conv'` or `'conv'`."""
        if self.use.op == 'dot':
            return 'dot'
        return '1x1 conv' if self.convolution.is_pointwise else 'conv'

    @property
    def convolution(self) -> Convolution:
        """The operation, if it is a convolution."""
        return Convolution(self.equation)

    @property
    def rows(self) -> int:
        """How many rows a matrix multiplies at once."""
        if self.use.op == 'conv':
            *image_shape, _ = self.convolution.result_shape
            return math.prod(image_shape)
        result = self.equation.outvars[0].aval
        weights = self.equation.invars[self.operand].aval
        contracted = contracted_axes(self.equation, self.operand)
        inputs = math.prod(_lengths(weights, contracted.of_weights))
        return result.size * inputs // weights.size

    @property
    def result_dtype(self) -> jnp.dtype:
        """The type in which products are added up."""
        return self.equation.outvars[0].aval.dtype

    @property
    def window(self) -> int:
        """Elements of a window; 1 if nothing is convolved."""
        return 1 if self.use.op == 'dot' else math.prod(self.convolution.window)

    @property
    def trips(self) -> int:
        """How often it runs; 1 if that depends on data."""
        return self.use.trips or 1

    def operands(self, data: Any, weights: Any) -> list[Any]:
        """Data and weights in the order of the operation."""
        return [weights, data] if self.operand == 0 else [data, weights]

    def multiply(self, data: jax.Array, operator: Any) -> jax.Array:
        """Runs the operation on data, with an operator in the place of the weights."""
        weights = self.equation.invars[self.operand].aval
        result_dtype = self.result_dtype
        if self.part is not None:
            operator = jax.tree.map(lambda array: array[self.part], operator)
        # The numbers of an operator are rounded as the model rounds those of the leaf.
        steps = self.use.site.view.steps
        casts = [step.equation for step in steps if step_name(step) in CASTS]

        def cast(array: jax.Array) -> jax.Array:
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                return array
            for equation in casts:
                (array,) = bind(equation, [array])
            return array.astype(weights.dtype)

        operator = jax.tree.map(cast, operator)
        with _precision(self.equation.params['precision']):
            if self.use.op == 'conv':
                result = self.convolution.run_with(operator, data, result_dtype)
            else:
                result = _dot(self.equation, self.operand, data, operator, result_dtype)
        return result.astype(result_dtype)


def _dot(
    equation: Any, operand: int, data: jax.Array, operator: Any, result_dtype: Any
) -> jax.Array:
    contracted = contracted_axes(equation, operand)
    batch = contracted.batch_of_data
    inputs = contracted.of_data
    free = _other_axes(data, {*batch, *inputs})
    batch_shape = _lengths(data, batch)
    free_shape = _lengths(data, free)
    input_shape = _lengths(data, inputs)
    arranged = data.transpose(*batch, *free, *inputs)
    rows = arranged.reshape(*batch_shape, math.prod(free_shape), math.prod(input_shape))

    def multiply(operator: Operator, rows: jax.Array) -> jax.Array:
        return operator.multiply(rows, result_dtype)

    for _ in batch:
        multiply = jax.vmap(multiply)
    products = multiply(operator, rows)

    weights = equation.invars[operand].aval
    outputs = _other_axes(weights, contracted.summed_or_shared)
    output_shape = _lengths(weights, outputs)
    products = products.reshape(*batch_shape, *free_shape, *output_shape)
    if operand == 1:
        return products
    # The program has the outputs before the free axes of the data.
    first, last = len(batch), len(batch) + len(free)
    order = [*range(first), *range(last, products.ndim), *range(first, last)]
    return products.transpose(order)


def _other_axes(array: Any, axes: Container[int]) -> list[int]:
    return [axis for axis in range(array.ndim) if axis not in axes]


def _lengths(array: Any, axes: Sequence[int]) -> list[int]:
    return [array.shape[axis] for axis in axes]


def _precision(precision: Any) -> Any:
    """A context in which an operator multiplies with the precision, or the algorithm, that the program asks for."""
    first = precision[0] if isinstance(precision, tuple) else precision
    if isinstance(first, lax.Precision):
        name = first.name.lower()
        return jax.default_matmul_precision(name)
    if isinstance(first, lax.DotAlgorithmPreset):
        is_default = first == lax.DotAlgorithmPreset.DEFAULT
        name = 'default' if is_default else first.name
        return jax.default_matmul_precision(name)
    return contextlib.nullcontext()
