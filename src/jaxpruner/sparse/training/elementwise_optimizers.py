"""Whether an optimizer takes the step of the masked dense model where only kept weights have moments.

It does if it treats each weight by itself, or sums over all of a leaf, to which pruned weights add nothing. So its
update is traced twice, for the whole leaves and for the compact ones. Both programs must have the same operations and
the same numbers, such as the divisor of a mean. And none may look along an axis of a compact leaf, as matrix products
of muon and row sums of adafactor do: its results have as many elements as the leaf, or one.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import optax

from jaxpruner import tree as tree_lib

_ALONG_AXES = ('dot_general', 'sort', 'cumsum')


def check_elementwise(
    optimizer: optax.GradientTransformation,
    params: tree_lib.PyTree,
    compact_params: tree_lib.PyTree,
) -> None:
    """Refuses an optimizer that looks along the axes of leaves, or computes by their shapes; computes nothing.

    Args:
      optimizer: any.
      params: the shapes of the parameters.
      compact_params: a tree like them of shapes; other ones where only kept weights have moments.

    Raises:
      ValueError: it is such an optimizer, or its update cannot be traced.

    >>> shapes = {'w': jax.ShapeDtypeStruct((4, 2), 'float32')}
    >>> kept = {'w': jax.ShapeDtypeStruct((3,), 'float32')}
    >>> check_elementwise(optax.adam(0.1), shapes, kept)
    """
    programs = []
    for shapes in (params, compact_params):
        state = jax.eval_shape(optimizer.init, shapes)
        try:
            program = jax.make_jaxpr(optimizer.update)(shapes, state, shapes).jaxpr
        except TypeError as error:  # extra arguments that are not known before training
            raise _refusal(f'cannot be looked at before training ({error})') from None
        programs.append(list(_equations(program)))
    whole, compact = programs
    if list(map(_outline, whole)) != list(map(_outline, compact)):
        raise _refusal('computes something else for other shapes')
    for equation, other in zip(whole, compact, strict=True):
        operands = [operand.aval for operand in equation.invars]
        sizes = {1, *[operand.size for operand in operands]}
        is_along_axes = equation.primitive.name in _ALONG_AXES or any(
            result.aval.size not in sizes for result in equation.outvars
        )
        for one, two in zip(operands, other.invars, strict=True):
            if is_along_axes and one.shape != two.aval.shape and one.size > 1:
                raise _refusal(f'applies {equation.primitive.name} to weights of shape {one.shape}')


def _outline(equation: Any) -> list[str]:
    """What is the same in both programs: the operation, how many operands it has, and the numbers among them."""
    literals = jax.extend.core.Literal
    operands = [str(each) if isinstance(each, literals) else '' for each in equation.invars]
    return [equation.primitive.name, *operands]


def _equations(program: Any) -> Iterator[Any]:
    """The equations of a program, and of those inside of them."""
    for equation in program.eqns:
        yield equation
        for parameter in equation.params.values():
            for entry in parameter if isinstance(parameter, tuple | list) else [parameter]:
                inner = getattr(entry, 'jaxpr', entry)
                if isinstance(inner, jax.extend.core.Jaxpr):
                    yield from _equations(inner)


def _refusal(reason: str) -> ValueError:
    return ValueError(
        'moments of kept weights alone (block_sparse, unstructured_sparse) need an optimizer that treats each weight '
        f'by itself, and this one {reason}. muon, adafactor and clipping by blocks look at more; use sgd, adam, adamw, '
        'lion or rmsprop'
    )
