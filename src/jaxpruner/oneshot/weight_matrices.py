"""The weight matrices that a model makes of a leaf: where it is contracted with data, and how it is read there."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.contracted_axes import contracted_axes
from jaxpruner.oneshot.matrix_layout import MatrixLayout
from jaxpruner.trace import Use, UseGraph, contractions
from jaxpruner.trace.views import ENTER_LOOP, LEAVE_LOOP, Move, Step, View

CONTRACTIONS = ('dot', 'conv')
# These may put an element in several places.
_REPEATS = frozenset('broadcast_in_dim concatenate gather stack tile'.split())
# These give floats another dtype; exact views are not cast to and from others.
CASTS = frozenset(('convert_element_type', 'reduce_precision'))
# Exact views go through these where a constant mask puts zeros in place of some weights.
MASKS = frozenset(('mul', 'select_n'))


class UnknownWeightsError(ValueError):
    """A contraction reads a leaf, and it is unknown which weight meets which input; `reason` does not name the leaf."""

    def __init__(self, path: tree_lib.Path, reason: str):
        name = tree_lib.path_string(path)
        self.reason = reason
        super().__init__(
            f"{name}: {reason}; leave the leaf dense (sparsity_type={{'{name}': None, '*': …}})"
        )


@dataclasses.dataclass(frozen=True)
class WeightMatrices:
    """Weight matrices that a model reads from one leaf: all of it, a part (queries in a fused projection), or a layer.

    One object is one way of reading one leaf. It holds no weights, and stands for one matrix, or for several of one
    shape: the layers of a stack, experts, groups. A leaf that is read in two ways has two objects.

    Attributes:
      path: the leaf's.
      uses: the contractions that read them, all in the same way.
      layout: of the operand of these contractions; layers that loops take apart stand in front.
      layer: which layer of the stack, an int or a traced scalar; `None` for all.

    >>> from jaxpruner.uses import param_uses
    >>> params = {'stack': jnp.ones((4, 3, 3))}
    >>> apply_fn = lambda params, x: lax.scan(lambda x, w: (x @ w, None), x, params['stack'])[0]
    >>> (matrices,) = find_matrices(param_uses(apply_fn, params, jnp.ones((2, 3))), ('stack',))
    >>> matrices.read(params['stack']).shape, matrices.at_layer(1).read(params['stack']).shape
    ((4, 3, 3), (3, 3))
    """

    path: tree_lib.Path
    uses: tuple[Use, ...]
    layout: MatrixLayout
    layer: Any = None

    @property
    def where(self) -> str:
        """The name of the leaf, with the layer."""
        name = tree_lib.path_string(self.path)
        if self.layer is None:
            return name
        return f'{name}, layer {self.layer}'

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., inputs, outputs]`."""
        return self.layout.matrices_shape[0 if self.layer is None else 1 :]

    @functools.cached_property
    def reading(self) -> Any:
        """How they are read, to be compared: two leaves of one shape and reading are read by the same program."""
        return self.layout, _steps(self.uses[0])

    @property
    def stack(self) -> tuple[Any, ...]:
        """The axes that loops take apart, outermost first."""
        return self.uses[0].site.view.stack

    @property
    def fills_stacks(self) -> bool:
        """Whether no other leaf lies in the same stacks."""
        return all(axis.range == (0, axis.length) for axis in self.stack)

    def at_layer(self, layer: Any) -> 'WeightMatrices':
        """Takes the matrices of one layer of the stack, or of all for `None`."""
        return dataclasses.replace(self, layer=layer)

    def read(self, leaf: jax.Array) -> jax.Array:
        """Reads the matrices `[..., inputs, outputs]`, in the leaf's own dtype, whatever the model casts it to."""
        if self.layer is None:
            operand = self._operand(leaf)
            return self.layout.to_matrices(operand)
        if self.of_slice is None:
            of_all_layers = self.at_layer(None).read(leaf)
            return lax.dynamic_index_in_dim(of_all_layers, self.layer, keepdims=False)
        part = lax.dynamic_index_in_dim(leaf, self.layer, keepdims=False)
        return self.of_slice.read(part)

    def write(self, matrices: jax.Array, leaf: Any) -> jax.Array:
        """Puts float matrices where `read` takes them from.

        The result has the shape of `leaf` (an array, or its shape and dtype), in float32 or wider, and is zero
        elsewhere.
        """
        if self.layer is not None:
            zeros = jnp.zeros(self.layout.matrices_shape, matrices.dtype)
            matrices = lax.dynamic_update_index_in_dim(zeros, matrices, self.layer, 0)
        dtype = tree_lib.at_least_float32(leaf.dtype)
        shape = jax.ShapeDtypeStruct(leaf.shape, dtype)
        # `read` returns zeros at weights that the model masks. `write` must reach them, so it leaves the masks out.
        read_operand = functools.partial(self._operand, masked=False)
        operand = jax.eval_shape(read_operand, shape)
        moved = self.layout.from_matrices(matrices).astype(operand.dtype)
        (written,) = jax.linear_transpose(read_operand, shape)(moved)
        return written

    @functools.cached_property
    def of_slice(self) -> 'WeightMatrices | None':
        """Reads one layer from its slice: `of_slice.read(leaf[layer])` is `at_layer(layer).read(leaf)`.

        So the other layers need not be read. `None` if no loop takes the leaf apart, or if the leaf is moved before:
        then a layer is no slice of the leaf's first axis.
        """
        view = self.uses[0].site.view
        if not _enters_loop_for_good(view.steps):
            return None
        # The slice is already inside the loop: it needs no step into it, and has no axis of layers.
        view = dataclasses.replace(view, steps=view.steps[1:])
        site = dataclasses.replace(self.uses[0].site, view=view)
        use = dataclasses.replace(self.uses[0], site=site)
        layout = self.layout
        layout = MatrixLayout(
            shape=layout.shape[1:],
            contract=_without_first_axis(layout.contract),
            free=_without_first_axis(layout.free),
            leading=_without_first_axis(layout.leading),
            groups=layout.groups,
        )
        return WeightMatrices(self.path, (use,), layout)

    def _operand(self, leaf: jax.Array, masked: bool = True) -> jax.Array:
        """Takes the operand of the contraction, without what other parameters put beside the leaf."""
        view = self.uses[0].site.view
        left_out = CASTS if masked else CASTS | MASKS
        steps = tuple(step for step in view.steps if step_name(step) not in left_out)
        own_view = dataclasses.replace(view, steps=steps)
        operand = own_view.read(leaf)
        # The slice of a stack has no axis for it.
        sliced = len(view.stack) + len(view.region) - operand.ndim
        index = []
        for axis in view.stack[sliced:]:
            index.append(slice(*axis.range))
        for start, stop in view.region:
            index.append(slice(start, stop))
        return operand[tuple(index)]


def find_matrices(graph: UseGraph, path: tree_lib.Path) -> tuple[WeightMatrices, ...]:
    """Finds the weight matrices of a leaf in the graph, one for each way in which contractions read it.

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
            reading = _layout_of(use), _steps(use)
            alike.setdefault(reading, []).append(use)
    matrices = []
    for (layout, _), uses in alike.items():
        matrices.append(WeightMatrices(path, tuple(uses), layout))
    if matrices:
        view = matrices[0].uses[0].site.view
        _check_disjoint(matrices, graph.program.in_avals[view.leaf], path)
    return tuple(matrices)


def _layout_of(use: Use) -> MatrixLayout:
    """Finds the layout of a leaf's part in the operand of a contraction; axes that loops take apart stand in front."""
    view = use.site.view
    contracted = contracted_axes(use.site.equation, use.site.operand)
    shape = _lengths(view.region)
    free = sorted(set(range(len(shape))) - contracted.summed_or_shared)
    stack = _lengths(axis.range for axis in view.stack)

    def behind_stack(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(len(stack) + axis for axis in axes)

    batch = behind_stack(contracted.batch_of_weights)
    return MatrixLayout(
        shape=(*stack, *shape),
        contract=behind_stack(contracted.of_weights),
        free=behind_stack(free),
        leading=(*range(len(stack)), *batch),
        groups=use.site.equation.params.get('feature_group_count', 1),
    )


def _lengths(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in ranges]


def _without_first_axis(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis - 1 for axis in axes if axis)


def _enters_loop_for_good(steps: tuple[Step, ...]) -> bool:
    """Whether the first step enters a loop that is never left."""
    depth = 0
    for step in steps:
        if step == ENTER_LOOP:
            depth += 1
        elif step == LEAVE_LOOP:
            depth -= 1
        if depth == 0:
            return False
    return bool(steps)


def step_name(step: Step) -> str | None:
    """Names the primitive of a step of a view; `None` for what is no equation."""
    return step.equation.primitive.name if isinstance(step, Move) else None


def _steps(use: Use) -> tuple[Any, ...]:
    """Tells how the leaf is read, to be compared."""

    def comparable(step: Step) -> Any:
        if not isinstance(step, Move):
            return str(step)
        equation = step.equation
        shapes = tuple(variable.aval.shape for variable in equation.invars)
        constants = []
        for number, array in step.others.items():
            constants.append((number, array.shape, array.tobytes()))
        settings = str(equation.params), shapes, step.operand, step.result
        return step_name(step), settings, tuple(constants)

    return tuple(map(comparable, use.site.view.steps))


def _check_use(use: Use, path: tree_lib.Path) -> None:
    """Refuses a contraction of which it is unknown which weight meets which input."""
    equation = use.site.equation
    operand = use.site.operand
    if not use.exact:
        raise UnknownWeightsError(
            path, f'what is contracted at {use.where} is computed from this leaf, not read from it'
        )
    if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating):
        raise UnknownWeightsError(
            path, f'what it is multiplied with at {use.where} is complex, which has no rule'
        )
    if _meets_part_of_inputs(use):
        raise UnknownWeightsError(
            path,
            f'other parameters are put beside this leaf before {use.where}, so that it meets a part of the inputs',
        )
    is_ragged = equation.primitive.name in contractions.RAGGED
    if is_ragged and not _has_one_matrix_per_group(equation, operand):
        raise UnknownWeightsError(
            path, f'groups of rows at {use.where} are not those of data that meet a matrix each'
        )
    if equation.params.get('batch_group_count', 1) != 1:
        raise UnknownWeightsError(
            path, f'the convolution at {use.where} has batch groups, which have no rule'
        )


def _meets_part_of_inputs(use: Use) -> bool:
    equation = use.site.equation
    operand = use.site.operand
    shape = equation.invars[operand].aval.shape
    region = use.site.view.region
    axes_in_part = set()
    for axis, length in enumerate(shape):
        if region[axis] != (0, length):
            axes_in_part.add(axis)
    is_grouped = equation.params.get('feature_group_count', 1) != 1
    if not is_grouped:
        contracted = contracted_axes(equation, operand)
        axes_in_part &= contracted.summed_or_shared
    return bool(axes_in_part)


def _has_one_matrix_per_group(equation: Any, operand: int) -> bool:
    axes = contractions.dot_axes(equation)
    left = equation.invars[0].aval
    has_rows_alone = left.ndim == 2 and not axes.batch[0]
    return operand == 1 and len(axes.groups) == 1 and has_rows_alone


def _may_repeat(step: Step) -> bool:
    """Whether a step may copy an element; a function may take it at several indices."""
    if isinstance(step, Move):
        return step_name(step) in _REPEATS
    return step not in (ENTER_LOOP, LEAVE_LOOP)


def _check_disjoint(matrices: Sequence[WeightMatrices], leaf: Any, path: tree_lib.Path) -> None:
    """Refuses a leaf of which a weight stands in two matrices, or twice in one."""
    view: View = matrices[0].uses[0].site.view
    if len(matrices) == 1 and not any(map(_may_repeat, view.steps)):
        is_repeated = math.prod(matrices[0].layout.shape) > leaf.size
    else:  # parts of the leaf may lie beside each other
        times = jnp.zeros(leaf.shape)
        for part in matrices:
            ones = jnp.ones(part.shape)
            times = times + part.write(ones, leaf)
        is_repeated = bool(jnp.max(times) > 1)
    if is_repeated:
        lines: dict[str, None] = {}
        for part in matrices:
            lines |= dict.fromkeys(use.where for use in part.uses)
        raise UnknownWeightsError(
            path,
            'a weight of this leaf stands in more than one place of its weight matrices '
            f'({" and ".join(lines)}), so that it has more than one kind of input',
        )
