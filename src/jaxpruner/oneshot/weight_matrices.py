"""The weight matrices that a model makes of a parameter: where it is contracted with data, and how it is read there."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot.matrices import MatrixLayout
from jaxpruner.uses import Use, UseGraph, contractions
from jaxpruner.uses.views import ENTER_LOOP, LEAVE_LOOP, Move

CONTRACTIONS = ('dot', 'conv')
# These may put an element in several places.
_REPEATS = frozenset('broadcast_in_dim concatenate gather stack tile'.split())
# These give floats another dtype; exact views are not cast to and from others.
_CASTS = frozenset(('convert_element_type', 'reduce_precision'))
# Exact views go through these where a constant mask puts zeros in place of some weights.
_MASKS = frozenset(('mul', 'select_n'))


class UnknownWeightsError(ValueError):
    """A leaf goes into a contraction, and it cannot be said which weight meets which input.

    Attributes:
      reason: why, without the leaf's name.

    >>> raise UnknownWeightsError(('w',), 'it is computed with')
    Traceback (most recent call last):
        ...
    jaxpruner.oneshot.weight_matrices.UnknownWeightsError: w: it is computed with; leave the leaf dense ...
    """

    def __init__(self, path: tree_lib.Path, reason: str):
        name = tree_lib.path_string(path)
        self.reason = reason
        super().__init__(
            f"{name}: {reason}; leave the leaf dense (sparsity_type={{'{name}': None, '*': …}})"
        )


@dataclasses.dataclass(frozen=True)
class WeightMatrices:
    """Weight matrices that are read from one parameter, all of it or a part (as queries are from a fused projection).

    Attributes:
      uses: the contractions that read them, all of them alike.
      layout: of the operand of these, layers that loops take apart in front.

    >>> from jaxpruner.uses import param_uses
    >>> params = {'w': jnp.arange(6.0).reshape(3, 2)}
    >>> graph = param_uses(lambda params, x: x @ params['w'], params, jnp.ones((4, 3)))
    >>> matrices = WeightMatrices(graph['w'], layout_of(graph['w'][0]))
    >>> matrices.read(params['w']).shape
    (3, 2)
    """

    uses: tuple[Use, ...]
    layout: MatrixLayout

    @property
    def key(self) -> Any:
        """What `read` and `write` do, to be compared: leaves of one shape and key are read alike."""
        return self.layout, _steps(self.uses[0])

    def read(self, leaf: jax.Array) -> jax.Array:
        """The matrices `[..., inputs, outputs]`, in the leaf's own dtype, whatever the model casts it to.

        Args:
          leaf: the parameter.
        """
        return self.layout.to_matrices(self._operand(leaf))

    def of_one_layer(self) -> 'WeightMatrices | None':
        """The matrices of one element of the leaf's first axis, if a loop takes the leaf apart along it as it is.

        Returns:
          What reads them from that element; `None` where the leaf is moved before it is taken apart.
        """
        use, layout = self.uses[0], self.layout
        steps, depth = use.site.view.steps, 0
        for number, step in enumerate(steps):
            depth += {ENTER_LOOP: 1, LEAVE_LOOP: -1}.get(step, 0) if isinstance(step, str) else 0
            if depth == 0 or (number == 0 and step != ENTER_LOOP):
                return None
        if not steps:
            return None
        view = dataclasses.replace(use.site.view, steps=steps[1:])
        use = dataclasses.replace(use, site=dataclasses.replace(use.site, view=view))
        contract, free, leading = (
            tuple(axis - 1 for axis in axes if axis)
            for axes in (layout.contract, layout.free, layout.leading)
        )
        return WeightMatrices(
            (use,), MatrixLayout(layout.shape[1:], contract, free, leading, layout.groups)
        )

    def write(self, matrices: jax.Array, leaf: Any) -> jax.Array:
        """Puts matrices where `read` found them.

        Args:
          matrices: float `[..., inputs, outputs]`.
          leaf: the parameter, or its shape.

        Returns:
          An array of the parameter's shape, in float32 or wider; zero where `read` took nothing.
        """
        shape = jax.ShapeDtypeStruct(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
        # What the model masks has its place in the matrices, too: it is pruned there like any weight that is zero.
        place = functools.partial(self._operand, masked=False)
        operand = jax.eval_shape(place, shape)
        moved = self.layout.from_matrices(matrices).astype(operand.dtype)
        (written,) = jax.linear_transpose(place, shape)(moved)
        return written

    @property
    def trips(self) -> tuple[tuple[int, int], ...]:
        """For each loop that takes the leaf apart, which of its trips get a part of it; others are of other leaves."""
        return tuple(entry.range for entry in self.uses[0].site.view.stack if entry.loop)

    @property
    def of_all_trips(self) -> bool:
        """Whether no other leaf stands in the same stacks."""
        return all(entry.range == (0, entry.length) for entry in self.uses[0].site.view.stack)

    def _operand(self, leaf: jax.Array, masked: bool = True) -> jax.Array:
        """What the contraction is given, less what other parameters put beside the leaf."""
        view = self.uses[0].site.view
        left_out = _CASTS if masked else _CASTS | _MASKS
        steps = tuple(step for step in view.steps if _name(step) not in left_out)
        operand = dataclasses.replace(view, steps=steps).read(leaf)
        # Of a stack that has been entered already there is one layer.
        stack = view.stack[len(view.stack) + len(view.region) - operand.ndim :]
        return operand[
            tuple(slice(*ends) for ends in (*(entry.range for entry in stack), *view.region))
        ]


def layout_of(use: Use) -> MatrixLayout:
    """How a leaf's part in the operand of a contraction is arranged, with axes that loops have taken apart in front.

    The inputs of a convolution are counted by height, width, channels, so that N:M groups lie along the channels.

    >>> from jaxpruner.uses import param_uses
    >>> graph = param_uses(lambda params, x: x @ params['w'].T, {'w': jnp.ones((2, 3))}, jnp.ones((4, 3)))
    >>> layout_of(graph['w'][0]).contract
    (0,)
    """
    equation, operand = use.site.equation, use.site.operand
    stack = tuple(entry.range[1] - entry.range[0] for entry in use.site.view.stack)
    shape = stack + tuple(stop - start for start, stop in use.site.view.region)
    contract, batch = contracted_axes(equation, operand)[:2]
    free = tuple(i for i in range(len(shape) - len(stack)) if i not in (*contract, *batch))
    contract, batch, free = (
        tuple(len(stack) + axis for axis in axes) for axes in (contract, batch, free)
    )
    return MatrixLayout(
        shape,
        contract,
        free,
        (*range(len(stack)), *batch),
        equation.params.get('feature_group_count', 1),
    )


class Contracted(NamedTuple):
    """The axes that a contraction sums over and shares, of the weights and of the data in the same order.

    >>> Contracted((0,), (), (1,), ()).of_data
    (1,)
    """

    of_weights: tuple[int, ...]
    batch_of_weights: tuple[int, ...]
    of_data: tuple[int, ...]
    batch_of_data: tuple[int, ...]


def contracted_axes(equation: Any, operand: int) -> Contracted:
    """Axes of a contraction, in the order in which inputs are counted: that of the weights, channels last in kernels.

    Args:
      equation: a product, or a convolution, of which the weights are the kernel; its data have windows, not axes.
      operand: which operand the weights are.

    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> contracted_axes(equation, 1)
    Contracted(of_weights=(0,), batch_of_weights=(), of_data=(1,), batch_of_data=())
    """
    if equation.primitive.name == 'conv_general_dilated':
        _, channels, *window = equation.params['dimension_numbers'].rhs_spec
        return Contracted((*window, channels), (), (), ())
    contract, batch, _ = contractions.dot_axes(equation)
    pairs = sorted(zip(contract[operand], contract[1 - operand], strict=True))
    of_weights, of_data = ([pair[side] for pair in pairs] for side in (0, 1))
    batch_of_weights = contractions.roles(
        equation, operand
    ).batch  # with the axis of groups, which data do not have
    return Contracted(tuple(of_weights), batch_of_weights, tuple(of_data), batch[1 - operand])


def find_matrices(graph: UseGraph, path: tree_lib.Path) -> tuple[WeightMatrices, ...]:
    """The weight matrices of a leaf.

    Args:
      graph: of the model.
      path: of a leaf that is in the graph.

    Returns:
      One for each way in which contractions read the leaf; none if it has no part in any.

    Raises:
      UnsupportedPrimitive: the leaf cannot be followed.
      UnknownWeightsError: a contraction meets something that is computed from the leaf, that other parameters have a
        part in, or that other contractions contract along other axes.

    >>> from jaxpruner.uses import param_uses
    >>> params = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2)}
    >>> graph = param_uses(lambda params, x: x @ params['w'] + params['b'], params, jnp.ones((4, 3)))
    >>> len(find_matrices(graph, ('w',))), len(find_matrices(graph, ('b',)))
    (1, 0)
    """
    alike: dict[Any, list[Use]] = {}
    for use in graph[path]:
        if use.op in CONTRACTIONS:
            _check_use(use, path)
            alike.setdefault((layout_of(use), _steps(use)), []).append(use)
    found = tuple(WeightMatrices(tuple(uses), layout) for (layout, _), uses in alike.items())
    if found:
        view = found[0].uses[0].site.view
        _check_disjoint(found, graph.program.in_avals[view.leaf], path)
    return found


def _name(step: Any) -> str | None:
    """The primitive of a step of a view; `None` for what is no equation."""
    return step.equation.primitive.name if isinstance(step, Move) else None


def _check_use(use: Use, path: tree_lib.Path) -> None:
    equation, operand = use.site.equation, use.site.operand
    if not use.exact:
        raise UnknownWeightsError(
            path, f'what is contracted at {use.where} is computed from this leaf, not read from it'
        )
    if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating):
        raise UnknownWeightsError(
            path, f'what it is multiplied with at {use.where} is complex, which has no rule'
        )
    shape, region = equation.invars[operand].aval.shape, use.site.view.region
    partial = {axis for axis, n in enumerate(shape) if region[axis] != (0, n)}
    contract, batch = contracted_axes(equation, operand)[:2]
    grouped = equation.params.get('feature_group_count', 1) != 1
    if partial and (grouped or partial & {*contract, *batch}):
        raise UnknownWeightsError(
            path,
            f'other parameters are put beside this leaf before {use.where}, so that it meets a part of the inputs',
        )
    if equation.primitive.name in contractions.RAGGED and not _is_one_matrix_for_each_group(
        equation, operand
    ):
        raise UnknownWeightsError(
            path, f'groups of rows at {use.where} are not those of data that meet a matrix each'
        )
    if equation.params.get('batch_group_count', 1) != 1:
        raise UnknownWeightsError(
            path, f'the convolution at {use.where} has batch groups, which have no rule'
        )


def _is_one_matrix_for_each_group(equation: Any, operand: int) -> bool:
    axes, left = contractions.dot_axes(equation), equation.invars[0].aval
    return operand == 1 and len(axes.groups) == 1 and left.ndim == 2 and not axes.batch[0]


def _steps(use: Use) -> tuple[Any, ...]:
    """How the leaf is read, to be compared."""

    def named(step: Any) -> Any:
        if not isinstance(step, Move):
            return str(step)
        equation = step.equation
        shapes = tuple(variable.aval.shape for variable in equation.invars)
        others = tuple(
            (number, array.shape, array.tobytes()) for number, array in step.others.items()
        )
        return _name(step), str(equation.params), shapes, step.operand, step.result, others

    return tuple(named(step) for step in use.site.view.steps)


def _may_repeat(step: Any) -> bool:
    """Whether a step may put an element in several places; what is neither an equation nor a loop takes indices."""
    return _name(step) in _REPEATS if isinstance(step, Move) else not isinstance(step, str)


def _check_disjoint(found: Sequence[WeightMatrices], leaf: Any, path: tree_lib.Path) -> None:
    """Each weight must stand in one matrix, and there once."""
    steps = [step for matrices in found for step in matrices.uses[0].site.view.steps]
    if len(found) == 1 and not any(map(_may_repeat, steps)):
        repeated = math.prod(found[0].layout.shape) > leaf.size
    else:  # parts of the leaf may lie beside each other
        times = [
            matrices.write(jnp.ones(matrices.layout.matrices_shape), leaf) for matrices in found
        ]
        repeated = bool(jnp.max(sum(times)) > 1)
    if repeated:
        lines = ' and '.join(
            dict.fromkeys(use.where for matrices in found for use in matrices.uses)
        )
        raise UnknownWeightsError(
            path,
            f'a weight of this leaf stands in more than one place of its weight matrices ({lines}), so that it has '
            'more than one kind of input',
        )
