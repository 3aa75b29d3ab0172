"""`channel_groups`: traces a model once and finds the channels that can be removed from it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.structure import modules
from jaxpruner.structure.analysis.axes import (
    Axes,
    Pin,
    atoms_of_values,
    new_axes,
    set_pin,
    sizes_of,
)
from jaxpruner.structure.analysis.inference import Inference
from jaxpruner.structure.analysis.live_evaluator import live_in_whole
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.analysis.ties import Ties
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.groups import find_groups
from jaxpruner.structure.programs import Model, ModelProgram, returned_leaves, shape_of_leaf
from jaxpruner.trace.program import shape_of
from jaxpruner.trace.walk import leaf_shape
from jaxpruner.tree import Path, PyTree


def channel_groups(
    apply_fn: Callable[..., Any],
    params: PyTree,
    *inputs: Any,
    state: PyTree | None = None,
) -> ChannelGraph:
    """Finds which channels of a model can be removed, and what has to be removed together.

    Each axis of each value in the traced program is an expression over atoms. A reshape makes products of atoms, a
    concatenation makes sums. Axes that operations tie together become one atom. An atom is a group if it lies along
    axes of parameters and nothing pins it. Groups are hidden units, channels, heads, features of heads, or the width of
    a residual stream.

    The model is traced, not computed. So shapes (`jax.ShapeDtypeStruct`) are enough for parameters and inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace; `(params, state, *inputs) -> results`
        if there is a state. Or an NNX or Equinox module, after which only its inputs are given. It is traced in
        evaluation mode. Its parameters are `nnx.state(module, nnx.Param)` or `equinox.filter(module,
        equinox.is_array)`, and its other arrays are the state.
      params: any pytree of arrays, or of their shapes.
      *inputs: the other arguments, pytrees of arrays or of their shapes. The axes of inputs and results stay as they
        are.
      state: arrays, or their shapes, that belong to channels and are no parameters, such as the statistics of batch
        normalization or the keys and values of earlier tokens. They are cut, too. A part of the results is the returned
        state, and is cut, if it has the names and shapes of the state or of a named entry of it.

    Returns:
      The groups by name. Each axis of a leaf is in a group or in `pinned`, unless the leaf is in `unused`.

    Raises:
      TypeError: `apply_fn` is neither a function nor such a module; or a leaf of `params` is no array.
      ValueError: a leaf of the state has the path of a parameter, or several parts of the results could be the state.

    >>> import jax.numpy as jnp
    >>> params = {'up': jnp.ones((3, 8)), 'bias': jnp.ones(8), 'down': jnp.ones((8, 2))}
    >>> def apply(p, x):
    ...     return jnp.tanh(x @ p['up'] + p['bias']) @ p['down']
    >>> graph = channel_groups(apply, params, jnp.ones((5, 3)))
    >>> graph.groups['up[1]'].size
    8
    >>> [f'{member.name}[{member.axis}]' for member in graph.groups['up[1]'].members]
    ['bias[0]', 'down[0]', 'up[1]']

    With a state:

    >>> def normalized(p, state, x):
    ...     hidden = x @ p['up']
    ...     mean = 0.9 * state['mean'] + 0.1 * hidden.mean(0)
    ...     return (hidden - mean + p['bias']) @ p['down'], {'mean': mean}
    >>> state = {'mean': jnp.zeros(8)}
    >>> graph = channel_groups(normalized, params, jnp.ones((5, 3)), state=state)
    >>> graph.shrink(state, {'up[1]': [0, 1]})['mean'].shape
    (2,)
    """
    arrays = modules.arrays_of(apply_fn, (params, *inputs))
    if arrays is not None:
        if state is not None:
            raise TypeError('a module holds its own state; leave state= out')
        program = ModelProgram.of(arrays.apply, arrays.state, arrays.inputs)
        return analyse(arrays.params, [program])
    if not modules.is_function(apply_fn):
        given, function = modules.describe(apply_fn)
        raise TypeError(
            f'channel_groups takes a function of parameters and inputs, or an NNX or Equinox module, got {given}; '
            f'give {function}'
        )
    program = ModelProgram.of(apply_fn, state, inputs)
    return analyse(params, [program])


def analyse(params: PyTree, programs: Sequence[ModelProgram]) -> ChannelGraph:
    """Makes the graph of a model with these programs. The first one names the groups."""
    paths, arrays, _ = tree_lib.flatten_with_paths(params)
    shapes = map(leaf_shape, arrays, paths)  # raises where a leaf is no array
    leaves = _Leaves(paths, list(map(new_axes, shapes)))
    states = _States(paths)
    traces = []
    traced_programs = []
    axes_read: list[Axes] = []
    for program in programs:
        owner = 'the model' if len(programs) == 1 else program.name
        program_trace = _trace_program(program, params, leaves, states, owner)
        traces.append(program_trace.trace)
        traced_programs.append(program_trace.program)
        axes_read += program_trace.read
    _pin_unread(leaves.axes, axes_read)
    shapes_of_params = jax.tree.map(shape_of_leaf, params)
    model = Model(shapes_of_params, tuple(traced_programs), analyse)
    return dataclasses.replace(find_groups(traces), model=model)


class _Leaves(NamedTuple):
    """The paths and axes of the parameters, or of a state."""

    paths: Sequence[Path]
    axes: Sequence[Axes]


class _ProgramTrace(NamedTuple):
    """A program, its trace, and the axes of values that it reads."""

    program: ModelProgram
    trace: Trace
    read: Sequence[Axes]


def _trace_program(
    program: ModelProgram,
    params: PyTree,
    leaves: _Leaves,
    states: '_States',
    owner: str,
) -> _ProgramTrace:
    """Traces a program, and finds the axes of each of its values."""
    make_jaxpr = jax.make_jaxpr(program.apply_fn, return_shape=True)
    closed_jaxpr, results = make_jaxpr(params, *program.arguments)
    returned = returned_leaves(program.state, results)
    state_leaves = states.leaves_of(program.state)
    axes_of_inputs = _pin_inputs(closed_jaxpr, leaves, state_leaves, owner)

    inference = Inference(leaves.axes)
    arguments = [*leaves.axes, *state_leaves.axes, *axes_of_inputs]
    axes_of_results = inference.visit_whole(closed_jaxpr, arguments)
    for number, axes in enumerate(axes_of_results):
        if number in returned:
            ties = Ties(functools.partial(_pin_of_returned_state, number, owner))
            ties.unify_each(axes, state_leaves.axes[returned[number]])
        else:
            _pin_each(axes, f'result {number} of {owner}')
    live = live_in_whole(closed_jaxpr.jaxpr)
    count = len(leaves.paths)
    never = len(inference.equations)
    first_uses = []
    for number in range(count):
        first_uses.append(inference.first_uses.get(number, never))
    trace = Trace(
        program=closed_jaxpr,
        paths=leaves.paths,
        leaves=leaves.axes,
        state_paths=state_leaves.paths,
        states=state_leaves.axes,
        returned=returned,
        equations=inference.equations,
        constants=inference.constants,
        trips=inference.trips,
        contractions=inference.contractions,
        used=live.inputs[:count],
        first_uses=first_uses,
    )
    program = program._replace(results=jax.tree.structure(results))
    return _ProgramTrace(program, trace, [*inference.read, *axes_of_results])


def _pin_inputs(
    closed_jaxpr: Any, leaves: _Leaves, state_leaves: _Leaves, owner: str
) -> list[Axes]:
    """Makes pinned axes for the inputs after the parameters and the state."""
    first = len(leaves.paths) + len(state_leaves.paths)
    axes_of_inputs = []
    variables = closed_jaxpr.jaxpr.invars[first:]
    for number, variable in enumerate(variables):
        axes = new_axes(shape_of(variable))
        _pin_each(axes, f'input {number} of {owner}')
        axes_of_inputs.append(axes)
    return axes_of_inputs


class _States:
    """The axes of states. Leaves with the same path in several programs are the same."""

    def __init__(self, param_paths: Sequence[Path]):
        self._param_paths = frozenset(param_paths)
        self._axes: dict[Path, Axes] = {}

    def leaves_of(self, state: PyTree) -> _Leaves:
        """The paths and axes of the leaves of a state.

        Raises:
          ValueError: a leaf has the path of a parameter, or a different rank in another program.
        """
        paths, leaves, _ = tree_lib.flatten_with_paths(state)
        axes_of_leaves = []
        for path, leaf in zip(paths, leaves, strict=True):
            if path in self._param_paths:
                raise ValueError(
                    f'{tree_lib.path_string(path)} is the path of a leaf of the state and of a parameter; give the '
                    'state a name, state={"state": state}'
                )
            axes_of_leaves.append(self._axes_of_leaf(path, leaf.shape))
        return _Leaves(paths, axes_of_leaves)

    def _axes_of_leaf(self, path: Path, shape: tuple[int, ...]) -> Axes:
        own = new_axes(shape)
        others = self._axes.setdefault(path, own)
        name = tree_lib.path_string(path)
        if len(others) != len(own):
            raise ValueError(
                f'the leaf {name} of the state has shape {sizes_of(others)} in one program and {shape} in another; '
                'give different states different names'
            )
        shared = []
        for i, axis in enumerate(own):
            other = others[i]
            if axis.size != other.size:  # such as the batch of a cache
                reason = f'axis {i} of the state {name} has sizes {other.size} and {axis.size}'
                pin = Pin(reason, '', _no_line, mixes=False)
                set_pin(axis, pin)
                set_pin(other, pin)
                shared.append(axis)
            else:
                shared.append(other)
        return tuple(shared)


def _no_line() -> str:
    return ''


def _pin_of_returned_state(number: int, owner: str, reason: str) -> Pin:
    return Pin(f'result {number} of {owner}, a state: {reason}', '', _no_line)


def _pin_each(axes: Axes, owner: str) -> None:
    for i, axis in enumerate(axes):
        pin = Pin(f'axis {i} of {owner}', '', _no_line, mixes=False)
        set_pin(axis, pin)


def _pin_unread(leaves: Iterable[Axes], read: Iterable[Axes]) -> None:
    """Pins the parts of parameters that no program reads, such as positions beyond the length of the inputs."""
    read_atoms = set(atoms_of_values(read))
    reason = 'the model does not read this part for inputs of these shapes'
    pin = Pin(reason, '', _no_line, mixes=False)
    for atom in atoms_of_values(leaves):
        if atom not in read_atoms:
            set_pin(atom, pin)
