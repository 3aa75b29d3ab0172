"""`ChannelGraph`: the channels of a model that can be removed, and what can be done with them.

Take a model of two layers, `relu(x @ up + bias) @ down`, with 8 hidden units. Its graph has one group of 8 channels,
named `up[1]` after the first leaf that has them. A channel of the group is a column of `up`, an element of `bias` and a
row of `down`. `shrink` with `keep={'up[1]': [0, 3]}` leaves 2 columns, 2 elements and 2 rows. The axes of the model's
inputs and results are pinned.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxpruner import text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.structure import blocks as blocks_lib
from jaxpruner.structure import channel_tables, choosing, costs
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.blocks import Block, ShallowApply
from jaxpruner.structure.cut import Cut, KeepByGroup, check_keep, cut_tree
from jaxpruner.structure.groups import Group, PinnedAxis, find_groups
from jaxpruner.structure.programs import ModelProgram, Trace, abstract, arrays_of, trace_programs
from jaxpruner.structure.small_model import SmallApply, Verification, parts_of
from jaxpruner.tree import Path, PyTree

_MOST_MEMBERS = 6  # in a row of the table


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ChannelGraph:
    """The channels of a model: which can be removed together, and which cannot be removed. Made by `channel_groups`.

    Each axis of more than one element is in a group or in `pinned`, unless its leaf is in `unused`.

    Attributes:
      groups: name -> group, in the order in which the model uses their first leaves.
      pinned: axes of leaves that stay as they are.
      unused: paths of leaves that have no part in the results.
      traces: the traced programs, the first one and those added with `also`, and the axes of their values.
      params: of the model, `jax.ShapeDtypeStruct` for arrays.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> def apply(p, x):
    ...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
    >>> shapes = {'up': (3, 8), 'bias': (8,), 'down': (8, 2)}
    >>> graph = channel_groups(apply, {name: jnp.ones(shape) for name, shape in shapes.items()}, jnp.ones((5, 3)))
    >>> print(graph)
    group  channels  parameters  exact  members
    --------------------------------------------------
    up[1]         8          48  yes    bias, down, up
    2 axes stay as they are; graph.explain(leaf, axis) says why
    >>> print(graph.explain('down', 1))
    down[1], 2 channels, stays: axis 1 of result 0 of the model
    """

    groups: Mapping[str, Group]
    pinned: tuple[PinnedAxis, ...]
    unused: tuple[Path, ...]
    traces: tuple[Trace, ...]
    params: PyTree

    @property
    def trace(self) -> Trace:
        """The trace of the first program."""
        return self.traces[0]

    def also(
        self, apply_fn: Callable[..., Any], *inputs: Any, state: PyTree | None = None
    ) -> 'ChannelGraph':
        """The graph of this model with one more program of the same parameters, such as evaluation or decoding.

        A channel can be removed if every program allows it. Its group is exact if it is exact in every program. Groups
        are named after the first program. Leaves of states with the same path are the same in all programs.

        Args:
          apply_fn: `(params, *inputs) -> results`, or `(params, state, *inputs) -> results` if there is a state.
          *inputs: as in `channel_groups`.
          state: as in `channel_groups`.

        Raises:
          ValueError: as in `channel_groups`; or the graph has this function already.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1))}
        >>> def apply(p, x):
        ...     return jnp.tanh(x @ p['up']) @ p['down']
        >>> def features(p, x):
        ...     return jnp.tanh(x @ p['up'])
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> print(graph.also(features, jnp.ones((5, 2))).explain('up', 1))
        up[1], 4 channels, stays: axis 1 of result 0 of features
        """
        added = ModelProgram.of(apply_fn, state, inputs)
        programs = [trace.source for trace in self.traces]
        if apply_fn in [program.apply_fn for program in programs]:
            raise ValueError(f'the graph has the program {added.name} already')
        return _analyse(self.params, [*programs, added])

    def with_program(self, number: int, params: PyTree, program: ModelProgram) -> 'ChannelGraph':
        """The graph of the model with other parameters, and with one program replaced."""
        programs = [trace.source for trace in self.traces]
        programs[number] = program
        return _analyse(params, programs)

    def _number_of(self, apply_fn: Callable[..., Any] | None) -> int:
        """The number of the program with this function; 0 if there is no function.

        Raises:
          ValueError: there is no such program.
        """
        functions = [trace.source.apply_fn for trace in self.traces]
        for number, own in enumerate(functions):
            # A program without some blocks is also found by the function of the whole program.
            if apply_fn in (None, own, getattr(own, 'whole', None)):
                return number
        names = ', '.join([trace.source.name for trace in self.traces])
        raise ValueError(
            f'the graph was made of {names}, not of {apply_fn!r}; add it with graph.also before channels are chosen'
        )

    def explain(self, leaf: Path | str, axis: int) -> str:
        """Describes an axis of a leaf: its groups, or why it stays.

        Args:
          leaf: its path, as a tuple or as text.
          axis: of the leaf; negative ones count from the end.

        Raises:
          KeyError: there is no such leaf.
          ValueError: it has no such axis.
        """
        path_of = {tree_lib.path_string(path): path for path in self.trace.leaves}
        name = leaf if isinstance(leaf, str) else tree_lib.path_string(leaf)
        if name not in path_of:
            raise KeyError(f'no parameter {leaf!r}; {tree_lib.nearest(name, path_of)}')
        path = path_of[name]
        sizes = sizes_of(self.trace.leaves[path])
        if not -len(sizes) <= axis < len(sizes):
            raise ValueError(f'{name} has {len(sizes)} axes, so there is no axis {axis}')
        axis %= len(sizes)
        own_name = f'{name}[{axis}]'
        if path in self.unused:
            return f'{own_name}: the leaf has no part in the results of the model'
        lines = []
        for group in self.groups.values():
            names = dict.fromkeys([f'{member.name}[{member.axis}]' for member in group.members])
            if own_name in names:
                others = ', '.join([name for name in names if name != own_name])
                exact = 'exact' if group.exact else f'not exact: {group.reason}'
                cut = f'{own_name} can be cut in group {group.name}, {group.size} channels'
                lines.append(f'{cut}{f", with {others}" if others else ""}; {exact}')
        for pinned in self.pinned:
            if (pinned.path, pinned.axis) == (path, axis):
                part = '' if pinned.size == sizes[axis] else f' from {pinned.offset} on'
                lines.append(f'{own_name}{part}, {pinned.size} channels, stays: {pinned.pin}')
        return '\n'.join(lines) or f'{own_name} has {sizes[axis]} element'

    def __repr__(self) -> str:
        rows = []
        for group in self.groups.values():
            paths = list(dict.fromkeys([member.path for member in group.members]))
            levels = zip(*[path[:-1] for path in paths], strict=False)
            shared = len(list(itertools.takewhile(lambda level: len(set(level)) == 1, levels)))
            names = [tree_lib.path_string(path[shared:]) for path in paths]
            if len(names) > _MOST_MEMBERS:
                names[_MOST_MEMBERS:] = [f'and {len(names) - _MOST_MEMBERS} more']
            counts = str(group.size), f'{group.parameters:,}'
            rows.append((group.name, *counts, 'yes' if group.exact else 'no', ', '.join(names)))
        Column = text_tables.Column
        columns = [
            Column('group', overflow='fold'),
            *[Column(heading, align='right') for heading in ('channels', 'parameters')],
            Column('exact'),
            Column('members', overflow='wrap'),
        ]
        lines = [text_tables.to_text(columns, rows) if rows else 'no channels can be removed']
        inexact = [group for group in self.groups.values() if not group.exact]
        lines += [f'{group.name} is not exact: {group.reason}' for group in inexact]
        lines += [f'{len(self.pinned)} axes stay as they are; graph.explain(leaf, axis) says why']
        unused = map(tree_lib.path_string, self.unused)
        lines += [f'{name} has no part in the results' for name in unused]
        return '\n'.join(lines)

    choose = choosing.choose  # a method: its first argument is the graph

    def cost(self, keep: KeepByGroup | None = None) -> costs.Cost:
        """Counts the parameters, bytes and floating point operations of the model, whole or after a cut.

        Nothing is traced or compiled. The numbers are read off the trace, for inputs of its shapes.

        Args:
          keep: as in `shrink`, also of inexact groups. Without it the whole model is counted.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.cost()
        Cost(parameters=12, flops=120, bytes=48)
        >>> graph.cost({'up[1]': [0, 3]}).flops
        60
        """
        keep = keep or {}
        check_keep(self.groups, keep, allow_inexact=True)
        # All lists of a group have the same length.
        counts = {name: np.shape(indices)[-1] for name, indices in keep.items()}
        return costs.cost_function(self)(counts)

    def shrink(
        self, tree: PyTree, keep: KeepByGroup, allow_inexact: bool = False, *, verify: bool = True
    ) -> Any:
        """Cuts a tree: removed channels are left out of all its arrays.

        Args:
          tree: the parameters, or a tree of their structure such as masks (packed or not), averages or gradients; the
            state of the model; or a state of an optimizer, wrapped or not. Packed masks are packed anew. The batch of a
            cache may have another size.
          keep: name of a group -> the indices of its channels that stay, ascending. Where `Group.lists` has atoms, it
            may also be an array with such a list for each layer of a scan, expert or head, all of one length. Groups
            that are not named stay whole.
          allow_inexact: whether to cut groups for which this is not the same as zeroing them.
          verify: compare the smaller model with the zeroed one, as the method `verify` does. For each program of
            the model this compiles two programs, and runs three times. It is left out if inexact groups are allowed, if
            the tree cannot be the parameters (arrays of their structure, shapes and dtypes), or if the graph was made
            without arrays for inputs.

        Returns:
          The tree with smaller arrays, on the devices where they are.

        Raises:
          TypeError: `keep` is no mapping, or indices are no whole numbers.
          KeyError: there is no such group.
          IndexError: a group has no such index.
          ValueError: indices are missing, repeated or not in order; a group is not exact; an array is none of those
            above, such as factored moments; or the smaller model differs from the zeroed one.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.shrink(params, {'up[1]': [0, 3]})['up'].tolist()
        [[0.0, 3.0], [4.0, 7.0]]
        """
        cut = check_keep(self.groups, keep, allow_inexact)
        leaves, structure = jax.tree.flatten(tree)
        expected, own_structure = jax.tree.flatten(self.params)
        is_model = structure == own_structure and not tree_lib.has_traced(leaves)
        is_model = is_model and list(map(abstract, leaves)) == expected
        for trace in self.traces if is_model and verify and cut.lists and not allow_inexact else ():
            source: Any = trace.source
            if source.examples is not None:
                state = source.examples[0] if source.has_state else None
                inputs = source.examples[source.has_state :]
                verification = self.verify(tree, keep, *inputs, state=state, of=source.apply_fn)
                if verification.verdict == 'different':
                    where = f' in {source.name}' if self.traces[1:] else ''
                    raise ValueError(
                        f'the smaller model differs from the whole one with zeros{where} ({verification}); find the '
                        'groups that differ one by one with graph.verify, or take it all the same with verify=False'
                    )
        return cut_tree(tree, self.traces, cut)

    def zeroed(self, tree: PyTree, keep: KeepByGroup, allow_inexact: bool = False) -> Any:
        """As `shrink`, but removed channels are set to zero, and all shapes stay."""
        cut = check_keep(self.groups, keep, allow_inexact)
        return cut_tree(tree, self.traces, cut, to_zero=True)

    def small_apply(
        self,
        keep: KeepByGroup,
        allow_inexact: bool = False,
        *,
        of: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """The apply function of the smaller model: the same program with smaller shapes.

        It can be compiled, differentiated, mapped over and trained as the model can. Derivative rules of
        `jax.custom_jvp` and `jax.custom_vjp` stay. A rule that cannot be followed is an error when a derivative is
        taken. Numbers that were computed from an old width, such as `1 / width`, stay as they were. For inputs of other
        shapes the model is traced anew. Callbacks that only show something are left out.

        Args:
          keep: as in `shrink`.
          allow_inexact: as in `shrink`.
          of: the function of the program, if it is not the first one.

        Returns:
          `(params, *inputs) -> results`, or `(params, state, *inputs) -> results`, for parameters and a state that
          `shrink` returned. The state in the results is a small one, too.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; ValueError if there is no such program. When
            called it raises ValueError for parameters or a state of other shapes.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> keep = {'up[1]': [0, 3]}
        >>> graph.small_apply(keep)(graph.shrink(params, keep), jnp.ones((1, 2)))
        Array([[14.]], dtype=float32)
        """
        return SmallApply(self, self._number_of(of), keep, allow_inexact)

    def verify(
        self,
        params: PyTree,
        keep: KeepByGroup,
        *inputs: Any,
        state: PyTree | None = None,
        allow_inexact: bool = False,
        of: Callable[..., Any] | None = None,
    ) -> Verification:
        """Compares the smaller model with the zeroed one, the whole model whose removed channels are zero.

        The error is compared with the change that the removal makes. If the removal changes nothing, nothing is proven.
        Both models run with matrix products at full precision, for which the model is traced anew.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          *inputs: arrays.
          state: of the whole model, arrays. The state in the results is compared, too, without removed channels.
          allow_inexact: as in `shrink`.
          of: as in `small_apply`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; TypeError also if the state is missing.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> print(graph.verify(params, {'up[1]': [0, 3]}, jnp.ones((5, 2))))
        equal: the removal changes results by 14, the error is 0, and rounding explains 0.00167
        """
        number = self._number_of(of)
        traced = self.traces[number].source
        if traced.has_state != (state is not None):
            expected = 'a state: give state=' if traced.has_state else 'no state'
            raise TypeError(f'{traced.name} takes {expected}')
        own_params, _ = parts_of(self, number)
        own_params.check(params, Cut({}))
        program = ModelProgram.of(traced.apply_fn, state, inputs)
        whole = [params] if state is None else [params, state]
        with jax.default_matmul_precision('highest'):
            graph = self.with_program(number, params, program)
            return SmallApply(graph, number, keep, allow_inexact).verify(whole, inputs)

    @functools.cached_property
    def blocks(self) -> Mapping[str, Block]:
        """The residual blocks that can be left out, by name, in the order of the first program.

        A block computes something from a stream and adds it to the stream. Blocks inside loops, or inside functions
        with a `jit` of their own, are not found. Layers of a scan are a group instead, see `Group.is_depth`.
        """
        return blocks_lib.find_blocks(self.traces)

    def without_blocks(self, names: Iterable[str], allow_inexact: bool = False) -> 'ChannelGraph':
        """The graph of the model without some residual blocks: its programs do not compute them.

        Args:
          names: of blocks.
          allow_inexact: whether to leave out blocks for which this is not the same as zeroing them.

        Returns:
          A graph for parameters that `drop_blocks` returned; `small_apply({})` is the model's function.

        Raises:
          KeyError, ValueError: as in `drop_blocks`.
        """
        chosen = blocks_lib.chosen_blocks(self.blocks, names, allow_inexact)
        programs = []
        for trace in self.traces:
            shallow_apply = ShallowApply(trace.source, self.params, chosen)
            programs.append(trace.source._replace(apply_fn=shallow_apply))
        return _analyse(blocks_lib.drop(self.params, chosen), programs)

    def drop_blocks(self, tree: PyTree, names: Iterable[str], allow_inexact: bool = False) -> Any:
        """Replaces the leaves of some residual blocks by `None`, so that they take no memory and are not trained.

        Args:
          tree: the parameters, or a tree of their structure such as masks, averages or gradients; or a state of an
            optimizer. The state of the model stays whole.
          names: of blocks.
          allow_inexact: as in `without_blocks`.

        Raises:
          KeyError: there is no such block.
          ValueError: a block is not exact.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'block': {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 2))}, 'head': jnp.ones((2, 1))}
        >>> def apply(p, x):
        ...     return (x + jnp.tanh(x @ p['block']['up']) @ p['block']['down']) @ p['head']
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> small = graph.drop_blocks(params, ['block'])
        >>> small['block']
        {'down': None, 'up': None}
        >>> graph.without_blocks(['block']).small_apply({})(small, jnp.ones((1, 2)))
        Array([[2.]], dtype=float32)
        """
        chosen = blocks_lib.chosen_blocks(self.blocks, names, allow_inexact)
        return blocks_lib.drop(tree, chosen)

    def nonzero_channels(self, tree: PyTree) -> dict[str, np.ndarray]:
        """Finds the channels that `shrink` has to keep so that no result changes: those that are not zero already.

        Not all members of a channel have to be zero. It is enough if the others then have no part in the results: a
        column of a kernel with its bias is enough, and so is the row of the next kernel. The program is searched for
        sets of members that are enough. Groups that are not exact are left out.

        Args:
          tree: parameters; masks, packed or not; or a state of a wrapped optimizer, which holds masks. It may be a
            subtree, such as `variables['params']`: leaves that are missing or `None` count as not zero.

        Returns:
          Name of a group -> indices, ascending, for groups that have zero channels, too. A group whose channels are all
          zero keeps the first one. Where layers, experts or heads differ in their zero channels, each has a list of its
          own. All lists are as long as the longest.

        Raises:
          TypeError: values are traced.
          ValueError: a leaf has another shape than the model's, or no leaf is a parameter of the model.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1)).at[1:3].set(0)}
        >>> graph = channel_groups(lambda p, x: jnp.cos(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.nonzero_channels(params)
        {'up[1]': array([0, 3])}
        """
        return channel_tables.nonzero_channels(self.traces, self.groups.values(), tree)


def channel_groups(
    apply_fn: Callable[..., Any], params: PyTree, *inputs: Any, state: PyTree | None = None
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
      The groups by name. Each axis of more than one element is in a group or in `pinned`, unless its leaf is in
      `unused`.

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
    arrays = arrays_of(apply_fn, (params, *inputs))
    if arrays is not None:
        if state is not None:
            raise TypeError('a module holds its own state; leave state= out')
        apply_fn, inputs = arrays.apply, arrays.inputs
        params, state = (*arrays.trees, None)[:2]
    return _analyse(params, [ModelProgram.of(apply_fn, state, inputs)])


def _analyse(params: PyTree, programs: Sequence[ModelProgram]) -> 'ChannelGraph':
    """Makes the graph of a model with these programs. The first one names the groups."""
    traces = trace_programs(params, programs)
    shapes = jax.tree.map(abstract, params)
    return ChannelGraph(*find_groups(traces), traces, shapes)
