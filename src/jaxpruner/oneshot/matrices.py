"""How the leaves of a model are read as weight matrices.

A product `x @ w` sums over axis 0 of the leaf `w`: its inputs are the rows of a matrix, its outputs the columns. A
convolution's kernel of shape (3, 3, 8, 16) is a matrix of 72 inputs and 16 outputs. What a loop takes apart, experts
and groups are several matrices of one shape, `[..., inputs, outputs]`. `WeightMatrices` reads them from the leaf, and
writes them back, whatever the model does to the leaf before it multiplies.

>>> from jaxpruner.trace import param_uses
>>> params = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2)}
>>> graph = param_uses(lambda params, x: x @ params['w'] + params['b'], params, jnp.ones((4, 3)))
>>> (matrices,) = find_matrices(graph, ('w',))
>>> matrices.shape, find_matrices(graph, ('b',))
((3, 2), ())
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.trace import Use, UseGraph
from jaxpruner.trace.graph import input_axes_of, roles_of
from jaxpruner.trace.program import RAGGED, dot_axes
from jaxpruner.trace.views import Move

# These may put an element in several places.
_REPEATS = frozenset('broadcast_in_dim concatenate dynamic_slice gather stack tile'.split())
# These give floats another dtype; exact views are not cast to and from others.
CASTS = frozenset(('convert_element_type', 'reduce_precision'))
# Exact views go through these where a constant mask puts zeros in place of some weights.
MASKS = frozenset(('mul', 'select_n'))


def data_axes(equation: Any, operand: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds the axes of the data in a product whose operand number `operand` is the weights.

    Returns:
      The axes that are summed over, in the order of those of the weights, and the axes that the weights have, too.

    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> data_axes(equation, operand=1)
    ((1,), ())
    """
    axes = dot_axes(equation)
    pairs = sorted(zip(axes.contract[operand], axes.contract[1 - operand], strict=True))
    return tuple(axis for _, axis in pairs), axes.batch[1 - operand]


def channels_last(spec: Sequence[int]) -> list[int]:
    """The order of axes that puts the channels of an image last, given those of batch, channels and space."""
    batch, channels, *space = spec
    return [batch, *space, channels]


def windows_of(equation: Any, image: jax.Array) -> jax.Array:
    """Copies the windows of a convolution of images `[batch, *space, channels]`.

    Returns:
      `[batch, *space, elements]` in the result's space; of the elements the channels are innermost.
    """
    params, kernel = equation.params, equation.invars[1].aval.shape
    window = [kernel[axis] for axis in params['dimension_numbers'].rhs_spec[2:]]
    # Zeros around the images, and between their elements.
    sides = zip(params['padding'], params['lhs_dilation'], strict=True)
    inner = [(before, after, step - 1) for (before, after), step in sides]
    image = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
    batch, *space, channels = image.shape
    strides = [1, *params['window_strides'], 1]
    elements = []  # slices, which a CPU copies twice as fast as it gathers
    for offsets in itertools.product(*map(range, window)):
        starts, stops = [0], [batch]
        for number, offset in enumerate(offsets):
            dilation = params['rhs_dilation'][number]
            starts.append(offset * dilation)
            # As far behind the element as the last element of the window is.
            stops.append(space[number] - (window[number] - 1 - offset) * dilation)
        elements.append(lax.slice(image, [*starts, 0], [*stops, channels], strides))
    return jnp.concatenate(elements, axis=-1)


class UnknownWeightsError(ValueError):
    """A contraction reads a leaf, and it is unknown which weight meets which input; its text does not name the leaf."""


@dataclasses.dataclass(frozen=True)
class WeightMatrices:
    """Weight matrices that a model reads from one leaf: all of it, or a part (queries in a fused projection).

    One object is one way of reading one leaf. It holds no weights, and stands for one matrix, or for several of one
    shape: the layers of a stack, experts, groups. A leaf that is read in two ways has two objects.

    Inputs of a convolution's kernel are counted by height, width and channels, so that N:M groups lie along the
    channels.

    Attributes:
      path: the leaf's.
      uses: the contractions that read them, all in the same way.
      reading: that way, to be compared; `_reading_of` says what it holds.
      layer: which layer of the stack; `None` for all.

    >>> from jaxpruner.trace import param_uses
    >>> params = {'stack': jnp.ones((4, 3, 3))}
    >>> apply_fn = lambda params, x: jax.lax.scan(lambda x, w: (x @ w, None), x, params['stack'])[0]
    >>> (matrices,) = find_matrices(param_uses(apply_fn, params, jnp.ones((2, 3))), ('stack',))
    >>> matrices.read(params['stack']).shape, matrices.at_layer(1).read(params['stack']).shape
    ((4, 3, 3), (3, 3))
    """

    path: tree_lib.Path
    uses: tuple[Use, ...] = dataclasses.field(compare=False)
    reading: Any
    layer: Any = None

    @property
    def where(self) -> str:
        """The name of the leaf, with the layer."""
        return tree_lib.path_string(self.path)

    @property
    def stack(self) -> tuple[Any, ...]:
        """The axes that loops take apart, outermost first."""
        return self.uses[0].site.view.stack

    @property
    def fills_stacks(self) -> bool:
        """Whether no other leaf lies in the same stacks."""
        return all(axis.range == (0, axis.length) for axis in self.stack)

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., inputs, outputs]`; where there are groups, they are the axis before the inputs."""
        ranges, *axes, groups, _ = self.reading
        lengths = [stop - start for start, stop in ranges]
        leading, inputs, outputs = ([lengths[axis] for axis in own] for own in axes)
        if groups > 1:
            leading.append(groups)
        return *leading, math.prod(inputs), math.prod(outputs) // groups

    def at_layer(self, layer: int | None) -> 'WeightMatrices':
        """Takes the matrices of one layer of the stack, or of all for `None`."""
        if layer is None:
            return self
        return _OneLayer(self.path, self.uses, self.reading, layer)

    def read(self, leaf: jax.Array, left_out: frozenset[str] = CASTS) -> jax.Array:
        """Reads the matrices `[..., inputs, outputs]`, without what other parameters put beside them.

        They have the leaf's own dtype, whatever the model casts it to: such steps are `left_out`.
        """
        ranges, *axes, groups, _ = self.reading
        view = self.uses[0].site.view
        steps = tuple(step for step in view.steps if step_name(step) not in left_out)
        operand = dataclasses.replace(view, steps=steps).read(leaf)
        operand = operand[tuple(slice(start, stop) for start, stop in ranges)]
        arranged = operand.transpose([axis for own in axes for axis in own])
        lengths, (inputs, outputs) = arranged.shape[: len(axes[0])], self.shape[-2:]
        if groups == 1:
            return arranged.reshape(*lengths, inputs, outputs)
        return arranged.reshape(*lengths, inputs, groups, outputs).swapaxes(-3, -2)

    def write(self, matrices: jax.Array, leaf: Any) -> jax.Array:
        """Puts float matrices where `read` takes them from.

        The result has the shape of `leaf` (an array, or its shape and dtype), in float32 or wider, and is zero
        elsewhere.
        """
        # `read` returns zeros at weights that the model masks. `write` must reach them, so it leaves the masks out.
        read = functools.partial(WeightMatrices.read, self, left_out=CASTS | MASKS)
        like = jax.ShapeDtypeStruct(leaf.shape, tree_lib.at_least_float32(leaf.dtype))
        (written,) = jax.linear_transpose(read, like)(matrices.astype(like.dtype))
        return written

    def replace(
        self, leaf: jax.Array, mask: jax.Array, new: jax.Array | None, kept: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Puts new weights (`None` if those that are kept do not change) and their mask into a leaf and its mask."""
        is_removed = self.write(1 - kept.astype(jnp.float32), leaf) > 0
        if new is not None:
            is_replaced = self.write(jnp.ones(kept.shape), leaf) > 0
            leaf = jnp.where(is_replaced, self.write(new, leaf).astype(leaf.dtype), leaf)
        return jnp.where(is_removed, jnp.zeros_like(leaf), leaf), jnp.where(is_removed, 0, mask)


class _OneLayer(WeightMatrices):
    """The matrices of one layer of a stack."""

    @property
    def where(self) -> str:
        return f'{super().where}, layer {self.layer}'

    @property
    def shape(self) -> tuple[int, ...]:
        return super().shape[1:]

    @property
    def _row(self) -> slice | None:
        """The layer alone, if it is a row of the leaf: a loop takes the leaf apart before all else."""
        is_row = all(step.depth for step in self.uses[0].site.view.steps)
        return slice(self.layer, self.layer + 1) if is_row else None

    def read(self, leaf: jax.Array) -> jax.Array:
        row = self._row
        return super().read(leaf)[self.layer] if row is None else super().read(leaf[row])[0]

    def write(self, matrices: jax.Array, leaf: Any) -> jax.Array:
        stack = jnp.zeros(super().shape, matrices.dtype).at[self.layer].set(matrices)
        return super().write(stack, leaf)

    def replace(self, leaf, mask, new, kept):
        row = self._row
        if row is None:
            return super().replace(leaf, mask, new, kept)
        all_layers = WeightMatrices(self.path, self.uses, self.reading)
        new = None if new is None else new[None]
        changed = all_layers.replace(leaf[row], mask[row], new, kept[None])
        return leaf.at[row].set(changed[0]), mask.at[row].set(changed[1])


def step_name(step: Move) -> str:
    """Names the primitive of a step of a view."""
    return step.equation.primitive.name


def find_matrices(graph: UseGraph, path: tree_lib.Path) -> tuple[WeightMatrices, ...]:
    """Finds the weight matrices of a leaf in the graph, one for each way in which contractions read it.

    Raises:
      UnsupportedPrimitive: the leaf cannot be followed.
      UnknownWeightsError: a contraction meets something that is computed from the leaf, that other parameters have a
        part in, or that other contractions contract along other axes.
    """
    alike: dict[Any, list[Use]] = {}
    for use in graph[path]:
        # An `einsum` that sums over none of its axes scales, as a norm does.
        if use.op == 'conv' or (use.op == 'dot' and use.contract):
            if reason := _why_unknown(use):
                raise UnknownWeightsError(reason)
            alike.setdefault(_reading_of(use), []).append(use)
    matrices = tuple(WeightMatrices(path, tuple(uses), reading) for reading, uses in alike.items())
    if matrices and _is_repeated(matrices, graph):
        lines = dict.fromkeys(use.where for part in matrices for use in part.uses)
        raise UnknownWeightsError(
            'a weight of this leaf stands in more than one place of its weight matrices '
            f'({" and ".join(lines)}), so that it has more than one kind of input'
        )
    return matrices


def _reading_of(use: Use) -> Any:
    """Tells how a use reads a leaf, to be compared: ranges, three kinds of axes, groups, and steps.

    - The leaf's ranges in the operand of the contraction, with the axes of the stack in front.
    - Axes of stack and batch, axes that are summed over, and all others.
    - Into how many matrices the outputs are divided, as those of a grouped convolution.
    - What the model does to the leaf before.
    """
    equation, operand, view = use.site.equation, use.site.operand, use.site.view
    depth, roles = len(view.stack), roles_of(equation, operand)

    def comparable(step: Move) -> Any:
        shapes = tuple(variable.aval.shape for variable in step.equation.invars)
        constants = tuple((number, array.tobytes()) for number, array in step.others.items())
        settings = str(step.equation.params), step.operand, step.result, step.depth
        return step_name(step), settings, shapes, constants

    axes = roles.batch, input_axes_of(equation, operand), roles.free
    batch, inputs, outputs = (tuple(depth + axis for axis in own) for own in axes)
    ranges = (*(axis.range for axis in view.stack), *view.region)
    groups = equation.params.get('feature_group_count', 1)
    return ranges, (*range(depth), *batch), inputs, outputs, groups, (*map(comparable, view.steps),)


def _why_unknown(use: Use) -> str | None:
    """Tells why it is unknown which weight meets which input in a contraction; `None` if it is known."""
    equation, operand = use.site.equation, use.site.operand
    if not use.exact:
        return f'what is contracted at {use.where} is computed from this leaf, not read from it'
    params, region = equation.params, use.site.view.region
    shape = equation.invars[operand].aval.shape
    in_part = {axis for axis, length in enumerate(shape) if region[axis] != (0, length)}
    if params.get('feature_group_count', 1) == 1:
        in_part -= {*roles_of(equation, operand).free}
    if in_part:
        return f'other parameters are put beside this leaf before {use.where}, so that it meets a part of the inputs'
    is_known = params.get('batch_group_count', 1) == 1
    if equation.primitive.name in RAGGED:  # groups of rows meet a matrix each
        axes = dot_axes(equation)
        is_matrix = equation.invars[0].aval.ndim == 2 and not axes.batch[0]
        is_known = operand == 1 and len(axes.groups) == 1 and is_matrix
    is_complex = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating)
    return None if is_known and not is_complex else f'the product at {use.where} has no rule'


def _is_repeated(matrices: Sequence[WeightMatrices], graph: UseGraph) -> bool:
    """Whether a weight of the leaf stands in two matrices, or twice in one."""
    view = matrices[0].uses[0].site.view
    leaf = graph.program.in_avals[view.leaf]
    if len(matrices) == 1 and _REPEATS.isdisjoint(map(step_name, view.steps)):
        return math.prod(matrices[0].shape) > leaf.size
    times = sum(part.write(jnp.ones(part.shape), leaf) for part in matrices)
    return bool(jnp.max(times) > 1)


# Scores, and masks of scores: unstructured, or N:M along the inputs.


@jax.jit
def wanda_scores(weights: jax.Array, second_moment: jax.Array) -> jax.Array:
    r"""Computes $|w_{ij}| \cdot \lVert x_i \rVert_2$ of weight $j$ of input $i$.

    From Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023, which compares the
    weights of each output.

    Args:
      weights: float `[..., inputs, outputs]`.
      second_moment: sum of squares of each input, `[..., inputs]`.

    Returns:
      Scores in the weights' shape, float32 (float64 where the weights are).

    >>> wanda_scores(jnp.array([[2.0], [-3.0]]), jnp.array([9.0, 1.0])).tolist()
    [[6.0], [3.0]]
    """
    dtype = tree_lib.at_least_float32(weights.dtype)
    norms = jnp.sqrt(second_moment.astype(dtype))
    return jnp.abs(weights.astype(dtype)) * norms[..., None]


def check_ranking(sparsity_type: Any, per: str, inputs: int, where: str) -> None:
    """Refuses all but unstructured and N:M that divides the inputs of matrices, whatever its axis."""
    if per not in ('output', 'layer'):
        raise ValueError(f"weights are compared per 'output' or per 'layer', got per={per!r}")
    if sparsity_types.is_unstructured(sparsity_type):
        return
    if not isinstance(sparsity_type, sparsity_types.NByM):
        raise TypeError(
            f'{where}: calibrated pruning is unstructured or N:M, got {sparsity_type!r}; give Unstructured() or NByM'
        )
    if inputs % sparsity_type.m and not sparsity_type.allow_partial:
        raise ValueError(
            f'{where}: its {inputs} inputs do not divide into groups of m={sparsity_type.m}'
        )


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per'))
def keep_in_matrices(
    scores: jax.Array, sparsity, sparsity_type=sparsity_types.Unstructured(), per='output'
) -> jax.Array:
    """Makes the uint8 mask of weight matrices by their float scores `[..., inputs, outputs]`.

    `sparsity` is the share to remove, a scalar or one for each matrix; 0 keeps everything, and N:M takes all other
    values alike. `per` says what is ranked together where unstructured. `'output'`: the weights of one output.
    `'layer'`: all weights of one matrix. Of equal scores the lower input (per layer: the lower flat index) is kept, in
    N:M the higher one. NaN ranks lowest.

    >>> keep_in_matrices(jnp.array([[4.0, 1.0], [3.0, 2.0]]), 0.5).tolist()
    [[1, 0], [0, 1]]
    >>> keep_in_matrices(jnp.array([[4.0, 1.0], [3.0, 2.0]]), 0.5, per='layer').tolist()
    [[1, 0], [1, 0]]
    """
    *leading, inputs, outputs = scores.shape
    each = jnp.broadcast_to(jnp.asarray(sparsity, jnp.float32), leading)
    if isinstance(sparsity_type, sparsity_types.NByM):
        mask = n_by_m.keep_n_of_m(scores, sparsity_type.n, sparsity_type.m, -2)
        return mask | (each == 0)[..., None, None].astype(jnp.uint8)
    ranked = inputs if per == 'output' else inputs * outputs
    return keep_best(scores, selection.number_to_keep(ranked, each), per)


def keep_best(scores: jax.Array, counts: jax.Array, per: str) -> jax.Array:
    """Keeps so many scores of each output, or of each matrix, of `[..., inputs, outputs]`; counts are `[...]`."""
    counts = counts.ravel()
    if per == 'output':
        scores, counts = scores.swapaxes(-2, -1), jnp.repeat(counts, scores.shape[-1])
    rows = scores.reshape(counts.size, scores.size // max(counts.size, 1))
    mask = selection.keep_largest(rows, counts).reshape(scores.shape)
    return mask.swapaxes(-2, -1) if per == 'output' else mask
