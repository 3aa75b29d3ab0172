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
            programs.append(jax.make_jaxpr(optimizer.update)(shapes, state, shapes).jaxpr)
        except TypeError as error:  # extra arguments that are not known before training
            raise _refusal(f'cannot be looked at before training ({error})') from None
    _compare(*programs)


def _compare(program: Any, compact: Any) -> None:
    """Refuses programs that differ in more than shapes, and what looks along the axes of a leaf that is compact."""
    if len(program.eqns) != len(compact.eqns):
        raise _refusal('computes something else for other shapes')
    for equation, other in zip(program.eqns, compact.eqns, strict=True):
        name = equation.primitive.name
        inner, inner_compact = list(_bodies(equation)), list(_bodies(other))
        operands = [operand.aval for operand in equation.invars]
        others = [operand.aval for operand in other.invars]
        outline = name, _literals(equation), len(operands), len(inner)
        if outline != (other.primitive.name, _literals(other), len(others), len(inner_compact)):
            raise _refusal('computes something else for other shapes')
        compact_shapes = []
        for one, two in zip(operands, others, strict=True):
            if one.shape != two.shape and one.size > 1:
                compact_shapes.append(one.shape)
        sizes = {1, *[operand.size for operand in operands]}
        is_along_axes = name in _ALONG_AXES or any(
            result.aval.size not in sizes for result in equation.outvars
        )
        if compact_shapes and is_along_axes:
            raise _refusal(f'applies {name} to weights of shape {compact_shapes[0]}')
        for bodies in zip(inner, inner_compact, strict=True):
            _compare(*bodies)


def _literals(equation: Any) -> list[str]:
    literals = jax.extend.core.Literal
    return [str(operand) for operand in equation.invars if isinstance(operand, literals)]


def _bodies(equation: Any) -> Iterator[Any]:
    """The programs inside of an equation."""
    for parameter in equation.params.values():
        for entry in parameter if isinstance(parameter, tuple | list) else [parameter]:
            program = getattr(entry, 'jaxpr', entry)
            if isinstance(program, jax.extend.core.Jaxpr):
                yield program


def _refusal(reason: str) -> ValueError:
    return ValueError(
        'moments of kept weights alone (block_sparse, unstructured_sparse) need an optimizer that treats each weight '
        f'by itself, and this one {reason}. muon, adafactor and clipping by blocks look at more; use sgd, adam, adamw, '
        'lion or rmsprop'
    )
