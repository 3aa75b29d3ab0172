"""The sparsity type that removes whole channels from all of their leaves."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.channel_tables import ChannelTable, leaf_numbers
from jaxpruner.structure.choosing import matching
from jaxpruner.structure.cut import Cut, Lists
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.groups import Group
from jaxpruner.structure.traces import Trace
from jaxpruner.structure.zero_channels import insufficient_members
from jaxpruner.tree import Path


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GroupedChannels:
    r"""The sparsity type of a pruner that removes channels from all of their leaves.

    A hidden unit is a column of one kernel, an element of a bias and a row of the next kernel. `Channel` decides for
    each leaf by itself, so that little can be removed from a model afterwards. Here each group of a graph has one
    ranking. The score of a channel is the sum of the scores of all its weights,

    $$s_c = \sum_{w \in c} s_w,$$

    and `sparsity` is the share of the channels to remove. Biases and norms get masks, too, although the default filter
    leaves them out. Where layers of a scan, experts or heads may keep channels of their own, each has a ranking of its
    own, and all keep the same number. After training `graph.nonzero_channels(opt_state)` says which channels stay.
    `graph.shrink` then removes the others, and the model computes the same function.

    A group has the sparsity of its leader: of its leaves with more than one axis, the one that the model uses first. So
    `sparsity_distribution_fn` and `custom_sparsity_map` apply to leaders. A group whose leader has no sparsity stays
    whole. Some members may be no parameters of the pruner, such as running statistics, or may be left dense by name, if
    zeros in the other members remove the channel.

    It works with any pruner that ranks scores leaf by leaf. Global rankings refuse it. SET, RigL and AC/DC refuse it,
    too: a channel that is zero in all leaves has no gradient, so it could not come back.

    Args:
      graph: of the model, made by `channel_groups`. The parameters of the pruner may be a subtree of its parameters
        (`{'params': …, 'batch_stats': …}`).
      groups: names or globs of the groups that are pruned; by default all. Groups that are not exact, and layers of a
        scan, are only pruned if they are given by their full name.

    Raises:
      TypeError: `graph` is no `ChannelGraph`.
      KeyError: a name matches no group.
      ValueError: a name matches only groups that are not exact. Raised by `init` of a pruner: leaves have other shapes
        than in the graph, or a leaf without a mask would have to have one.

    >>> import jax.numpy as jnp
    >>> import jaxpruner
    >>> def apply(p, x):
    ...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
    >>> params = {'up': jnp.array([[1.0, 9.0, 2.0, 8.0]]), 'bias': jnp.ones(4), 'down': jnp.ones((4, 2))}
    >>> graph = jaxpruner.channel_groups(apply, params, jnp.ones((1, 1)))
    >>> pruner = jaxpruner.MagnitudePruning(sparsity_type=GroupedChannels(graph), sparsity=0.5)
    >>> pruned, masks = pruner.instant_sparsify(params)
    >>> masks['bias'].tolist(), masks['down'][:, 0].tolist()
    ([0, 1, 0, 1], [0, 1, 0, 1])
    >>> keep = graph.nonzero_channels(masks)
    >>> graph.shrink(pruned, keep)['up']
    Array([[9., 8.]], dtype=float32)
    """

    graph: ChannelGraph
    groups: str | Sequence[str] | None = None
    chosen: tuple[Group, ...] = dataclasses.field(init=False)  # the groups that are pruned
    _joined: dict[Any, Any] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.graph, ChannelGraph):
            raise TypeError(
                f'GroupedChannels takes a graph, as channel_groups(apply_fn, params, *inputs) makes it, got '
                f'{self.graph!r}'
            )
        groups, chosen = self.graph.groups, []
        for name in [self.groups] if isinstance(self.groups, str) else self.groups or ['*']:
            if name in groups:
                chosen.append(groups[name])
                continue
            names = matching(name, groups, 'groups')
            matches = [group for group in groups.values() if group.name in names]
            usable = [group for group in matches if group.exact and not group.is_depth]
            if not usable:
                raise ValueError(f'groups={name!r}: no group is exact; print(graph) says why')
            chosen += usable
        for group in chosen:
            if not group.exact:
                raise ValueError(
                    f'groups={self.groups!r}: removing channels of {group.name!r} is not the same as zeroing them: '
                    f'{group.reason}'
                )
        object.__setattr__(self, 'chosen', tuple(dict.fromkeys(chosen)))

    def __repr__(self) -> str:
        return f'GroupedChannels({", ".join(group.name for group in self.chosen)})'

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape; `join` compares shapes with those of the graph."""

    def join(self, shapes: Mapping[Path, tuple[int, ...]]) -> 'Sequence[GroupInLeaves]':
        """The groups whose leaders are among these leaves."""
        key = frozenset(shapes.items())
        if key in self._joined:
            return self._joined[key]
        trace = self.graph.trace
        numbers = leaf_numbers(trace, shapes)
        for path, number in numbers.items():
            shape = sizes_of(trace.leaves[number])
            if shapes[path] != shape:
                raise ValueError(
                    f'{tree_lib.path_string(path)} has shape {shapes[path]} where the graph has {shape}; make the '
                    'graph of the same model'
                )
        path_of = {number: path for path, number in numbers.items()}
        groups = []
        for group in self.chosen:
            member_paths = {member.path for member in group.members}
            own = [number for number, path in enumerate(trace.paths) if path in member_paths]
            # Of the leaves with more than one axis, the one that the model uses first.
            leader = min(own, key=lambda n: (len(trace.leaves[n]) < 2, trace.first_uses[n]))
            if leader in path_of:
                table = ChannelTable.of(trace, group, numbers)
                groups.append(GroupInLeaves(trace, path_of[leader], table, numbers))
        self._joined[key] = groups
        return groups

    def check_members(self, groups: 'Sequence[GroupInLeaves]', masked: Collection[Path]) -> None:
        """Refuses groups whose channels are not removed by masks of these leaves."""
        masked_in_model: set[Path] = set()
        for group in groups[:1]:  # all groups know the same leaves
            masked_in_model.update(map(group.path_in_model, masked))
        zeroed, missing = {}, {}
        for group in groups:
            atom = group.table.group.atom.resolved()
            members = group.table.group.members
            zeroed[atom] = frozenset(
                [(member.path, member.axis) for member in members if member.path in masked_in_model]
            )
            names = {member.name for member in members if member.path not in masked_in_model}
            missing[atom] = ', '.join(sorted(names))
        if not any(missing.values()):
            return  # all members are zero, and the groups are exact
        for atom in insufficient_members(self.graph.traces, zeroed):
            if missing.get(atom):
                raise ValueError(
                    f'channels do not vanish while {missing[atom]} get no masks; prune these leaves, too, '
                    f'or leave their group out of groups={self.groups!r}'
                )

    def kept_weights(self, counts: 'Sequence[tuple[GroupInLeaves, int]]', leaf: Path) -> int:
        """How many weights of a leaf are kept if these groups keep so many channels."""
        lists = {}
        for group_in_leaves, count in counts:
            group = group_in_leaves.table.group
            kept = np.broadcast_to(np.arange(count), (*sizes_of(group.lists), count))
            lists[group.atom.resolved()] = Lists.of(group, kept)
        axes = self.graph.trace.leaves[counts[0][0].numbers[leaf]]
        return math.prod(Cut(lists).shape(axes))


@dataclasses.dataclass(frozen=True, eq=False)
class GroupInLeaves:
    """A group among the leaves of a pruner, as `mask_calculator` ranks it.

    Attributes:
      trace: of the model.
      leader: the leaf whose sparsity is that of the group.
      table: of its channels.
      numbers: path of each leaf -> its number in the trace.
    """

    trace: Trace
    leader: Path
    table: ChannelTable
    numbers: Mapping[Path, int]

    @property
    def members(self) -> list[Path]:
        """The leaves that the channels lie in."""
        return list(self.table.indices)

    @property
    def size(self) -> int:
        """How many channels there are."""
        return self.table.group.size

    def path_in_model(self, leaf: Path) -> Path:
        """The path of a leaf in the model. The pruner may have a subtree of the model's parameters."""
        return self.trace.paths[self.numbers[leaf]]

    @property
    def is_stacked(self) -> bool:
        """Whether layers, experts or heads keep channels of their own."""
        return len(self.table.shape) > 1

    def pool(self, scores: Mapping[Path, jax.Array]) -> jax.Array:
        """The sum of the scores of each channel."""
        table = self.table.add_up(scores)
        return table.reshape(-1, self.size) if self.is_stacked else table

    def spread(self, verdicts: jax.Array, leaf: Path) -> jax.Array:
        """The verdict on the channel of each weight."""
        return self.table.look_up(verdicts.reshape(self.table.shape), leaf)
