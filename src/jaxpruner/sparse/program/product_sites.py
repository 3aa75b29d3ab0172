"""One product of a program: data become rows, an operator multiplies them, and its results become the program's."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.oneshot.contracted_axes import contracted_axes
from jaxpruner.oneshot.weight_matrices import CASTS, step_name
from jaxpruner.uses import Use
from jaxpruner.uses.bodies import bind


class Operator(Protocol):
    """What stands in the place of a leaf: a pytree whose arrays have the layers of the leaf in front.

    An operator may also have `convolve(image, convolution)`, with a `Convolution`; without it the windows of an image
    are gathered into rows.
    """

    def multiply(self, rows: jax.Array) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`, inside the model, for one layer."""
        ...


@runtime_checkable
class Convolving(Protocol):
    """An operator with a way of its own to convolve."""

    def convolve(self, image: jax.Array, convolution: 'Convolution') -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        ...


@runtime_checkable
class Accumulating(Protocol):
    """An operator that adds products up in another type than that of its operands.

    Such as int32 for products of int8, or float32 for those of bfloat16: the `preferred_element_type` of a program. For
    an operator without this method the rows are cast to that type first. That is exact, and takes longer.
    """

    def with_result_dtype(self, dtype: Any) -> 'Operator':
        """The operator whose results are added up, and returned, in a type."""
        ...


class ProductSite(NamedTuple):
    """Where a program multiplies data by a matrix.

    Attributes:
      use: the use of the leaf.
      part: which part of the leaf; `None` where it is read as a whole.
    """

    use: Use
    part: int | None = None

    @property
    def equation(self) -> Any:
        """The operation."""
        return self.use.site.equation

    @property
    def operand(self) -> int:
        """Which of its operands is the weights."""
        return self.use.site.operand

    @property
    def op(self) -> str:
        """`'dot'`, `'1x1 conv'` or `'conv'`."""
        if self.use.op == 'dot':
            return 'dot'
        return '1x1 conv' if is_pointwise(self.equation) else 'conv'

    @property
    def rows(self) -> int:
        """How many rows a matrix multiplies at once."""
        result = self.equation.outvars[0].aval
        weights = self.equation.invars[self.operand].aval
        if self.use.op == 'conv':
            features = self.equation.params['dimension_numbers'].out_spec[1]
            return math.prod(result.shape) // result.shape[features]
        contracted = contracted_axes(self.equation, self.operand)
        not_free = math.prod(weights.shape[axis] for axis in contracted.of_weights)
        return math.prod(result.shape) * not_free // math.prod(weights.shape)

    @property
    def result_dtype(self) -> jnp.dtype:
        """The type in which products are added up."""
        return self.equation.outvars[0].aval.dtype

    @property
    def window(self) -> int:
        """Elements of a window; 1 where nothing is convolved."""
        return 1 if self.use.op == 'dot' else math.prod(_window(self.equation))

    @property
    def trips(self) -> int:
        """How often it runs; once where data decide."""
        return self.use.trips or 1

    def operands(self, data: Any, weights: Any) -> list[Any]:
        """Data and weights in the order of the operation."""
        return [weights, data] if self.operand == 0 else [data, weights]

    def multiply(self, data: jax.Array, operator: Any) -> jax.Array:
        """The result of the operation on data, with an operator in the place of the weights."""
        weights = self.equation.invars[self.operand].aval
        result_dtype = self.result_dtype
        if self.part is not None:
            operator = jax.tree.map(lambda array: array[self.part], operator)
        operator = _cast(operator, self.use.site.view.steps, weights.dtype)
        if data.dtype != result_dtype or weights.dtype != result_dtype:
            if isinstance(operator, Accumulating):
                operator = operator.with_result_dtype(result_dtype)
            elif not (self.use.op == 'conv' and isinstance(operator, Convolving)):
                data = data.astype(result_dtype)
        run = _convolve if self.use.op == 'conv' else _dot
        with _precision(self.equation.params['precision']):
            result = run(self.use, data, operator)
        return result.astype(result_dtype)


def is_pointwise(equation: Any) -> bool:
    """Whether a convolution has a window of one element, so that it is a product of pixels."""
    params = equation.params
    window = _window(equation)
    is_padded = any(side != 0 for sides in params['padding'] for side in sides)
    is_dilated = any(step != 1 for step in params['lhs_dilation'])
    return math.prod(window) == 1 and not is_padded and not is_dilated


class Convolution(NamedTuple):
    """A convolution of images `[batch, *space, channels]` with kernels `[*window, channels, outputs]`."""

    equation: Any

    @property
    def window(self) -> tuple[int, ...]:
        """The shape of the window."""
        return _window(self.equation)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """`[batch, *space, outputs]` in the program."""
        numbers = self.equation.params['dimension_numbers']
        shape = self.equation.outvars[0].aval.shape
        return tuple([shape[axis] for axis in _from_spec(numbers.out_spec)])

    def run(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        """Convolves; image and kernel may have other numbers of channels than in the program."""
        numbers = self.equation.params['dimension_numbers']
        rank = image.ndim
        image = image.transpose(_to_spec(numbers.lhs_spec))
        outputs, channels, *window = numbers.rhs_spec
        order = [*window, channels, outputs]
        kernel = kernel.transpose([order.index(axis) for axis in range(rank)])
        (result,) = bind(self.equation, [image, kernel])
        return result.transpose(_from_spec(numbers.out_spec))


def _convolve(use: Use, data: jax.Array, operator: Any) -> jax.Array:
    equation = use.site.equation
    numbers = equation.params['dimension_numbers']
    image = data.transpose(_from_spec(numbers.lhs_spec))
    if isinstance(operator, Convolving):
        result = operator.convolve(image, Convolution(equation))
    else:
        windows = _windows(equation, image)
        *image_shape, elements = windows.shape
        rows = windows.reshape(math.prod(image_shape), elements)
        products = operator.multiply(rows)
        result = products.reshape(*image_shape, products.shape[-1])
    return result.transpose(_to_spec(numbers.out_spec))


def _windows(equation: Any, image: jax.Array) -> jax.Array:
    """The windows of images `[batch, *space, channels]` as `[batch, *space, elements]`, channels innermost."""
    params = equation.params
    image = _padded(params, image)
    axes = list(
        map(_WindowAxis, _window(equation), params['window_strides'], params['rhs_dilation'])
    )
    batch, *space, channels = image.shape
    strides = 1, *[axis.stride for axis in axes], 1
    elements = []
    for offsets in itertools.product(*[range(axis.length) for axis in axes]):
        start, stop = [0], [batch]
        for offset, axis, length in zip(offsets, axes, space, strict=True):
            first = offset * axis.dilation
            start.append(first)
            stop.append(first + length - axis.reach)
        element = lax.slice(image, (*start, 0), (*stop, channels), strides)
        elements.append(element)
    return elements[0] if len(elements) == 1 else jnp.concatenate(elements, axis=-1)


class _WindowAxis(NamedTuple):
    """How windows lie along an axis of an image.

    Attributes:
      length: elements of a window.
      stride: from one window to the next.
      dilation: from one element to the next.
    """

    length: int
    stride: int
    dilation: int

    @property
    def reach(self) -> int:
        """The distance from the first element of a window to the last."""
        return (self.length - 1) * self.dilation


def _padded(params: Mapping[str, Any], image: jax.Array) -> jax.Array:
    """The images with zeros around them, and between their elements."""
    config = [(0, 0, 0)]
    for (before, after), dilation in zip(params['padding'], params['lhs_dilation'], strict=True):
        config.append((before, after, dilation - 1))
    config.append((0, 0, 0))
    if not any(map(any, config)):
        return image
    zero = jnp.zeros((), image.dtype)
    return lax.pad(image, zero, config)


def _window(equation: Any) -> tuple[int, ...]:
    kernel = equation.invars[1].aval.shape
    return tuple([kernel[axis] for axis in equation.params['dimension_numbers'].rhs_spec[2:]])


def _from_spec(spec: Sequence[int]) -> list[int]:
    """The order that puts the channels of an image last."""
    batch, channels, *space = spec
    return [batch, *space, channels]


def _to_spec(spec: Sequence[int]) -> list[int]:
    """The order that puts channels from the last axis where a convolution has them."""
    order = _from_spec(spec)
    return [order.index(axis) for axis in range(len(order))]


def _dot(use: Use, data: jax.Array, operator: Any) -> jax.Array:
    equation, operand = use.site.equation, use.site.operand
    contracted = contracted_axes(equation, operand)
    batch, inputs = contracted.batch_of_data, contracted.of_data
    free = []
    for axis in range(data.ndim):
        if axis not in batch and axis not in inputs:
            free.append(axis)
    batch_shape, free_shape, input_shape = (_lengths(data, axes) for axes in (batch, free, inputs))
    arranged = data.transpose(*batch, *free, *inputs)
    rows = arranged.reshape(*batch_shape, math.prod(free_shape), math.prod(input_shape))

    multiply = _multiply
    for _ in batch:
        multiply = jax.vmap(multiply)
    products = multiply(operator, rows)

    weights = equation.invars[operand].aval
    outputs = []
    for axis in range(weights.ndim):
        if axis not in contracted.summed_or_shared:
            outputs.append(axis)
    products = products.reshape(*batch_shape, *free_shape, *_lengths(weights, outputs))
    if operand == 1:
        return products
    # The outputs stand before the free axes of the data.
    first_free, first_output = len(batch), len(batch) + len(free)
    return products.transpose(
        *range(first_free),
        *range(first_output, products.ndim),
        *range(first_free, first_output),
    )


def _lengths(array: Any, axes: Sequence[int]) -> list[int]:
    return [array.shape[axis] for axis in axes]


def _multiply(operator: Operator, rows: jax.Array) -> jax.Array:
    return operator.multiply(rows)


def _cast(operator: Any, steps: Sequence[Any], dtype: Any) -> Any:
    """The operator with its numbers rounded as the model rounds those of the leaf."""
    casts = [step.equation for step in steps if step_name(step) in CASTS]

    def cast(array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        for equation in casts:
            (array,) = bind(equation, [array])
        return array.astype(dtype)

    return jax.tree.map(cast, operator)


def _precision(precision: Any) -> Any:
    """The precision, or the algorithm, that the program asks for, for the products in an operator."""
    first = precision[0] if isinstance(precision, tuple) else precision
    if isinstance(first, lax.Precision):
        return jax.default_matmul_precision(first.name.lower())
    if isinstance(first, lax.DotAlgorithmPreset):
        is_default = first == lax.DotAlgorithmPreset.DEFAULT
        return jax.default_matmul_precision('default' if is_default else first.name)
    return contextlib.nullcontext()
