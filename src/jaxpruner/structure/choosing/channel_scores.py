"""Scores of channels: one number for each channel, from the scores of its weights in all members of its group.

    member  ('up', axis 1), scores of weights  [[1, 4], [2, 3]]   sum for each channel   [3, 7]
    member  ('bias', axis 0)                   [1, 0]                                    [1, 0]

The sums of each member are divided by their mean, which gives [0.6, 1.4] and [2, 0]. Then the members are added:
[2.6, 1.4]. Where `Group.lists` has atoms, such as layers of a scan, there is such a row for each of their indices.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, pick, resolve_each, sizes_of
from jaxpruner.structure.analysis.members import Group, Member
from jaxpruner.structure.analysis.positions import indices_of
from jaxpruner.structure.choosing.leaf_scores import LeafScores
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.trace.views import all_but
from jaxpruner.tree import Path

Table = np.ndarray
Normalise = Callable[[Table], Table]


def _over(scale: Callable[[Table], Any]) -> Normalise:
    """Divides a table by its scale. A table with a scale of zero stays as it is."""

    def divide(table: Table) -> Table:
        divisor = scale(table)
        return table / divisor if divisor > 0 else table

    return divide


def _standard(table: Table) -> Table:
    return _over(np.std)(table - table.mean())


NORMALISATIONS: Mapping[str, Normalise] = {
    'mean': _over(lambda table: np.abs(table).mean()),
    'max': _over(lambda table: np.abs(table).max()),
    'standard': _standard,
}
REDUCTIONS: Mapping[str, Callable[..., Table]] = {
    'sum': np.sum,
    'mean': np.mean,
    'max': np.max,
}


class Scorer(NamedTuple):
    """Makes scores of channels from scores of weights.

    Attributes:
      leaves: the axes of each leaf by its path.
      scores: of weights, or a function.
      reduce: how members are added up, a name of `REDUCTIONS`.
      normalise: what each member's table is divided by before; a name of `NORMALISATIONS`, a function of the table, or
        `None`.
    """

    leaves: Mapping[Path, Axes]
    scores: LeafScores
    reduce: str
    normalise: str | Normalise | None

    def score(self, group: Group, cut: Cut) -> Table:
        """The scores of a group's channels, of shape `(*sizes of Group.lists, channels)`.

        Weights that the cut removes count as zero.

        Raises:
          ValueError: a score is not finite, or no member has a score.
        """
        tables = []
        for member in group.members:
            axes = self.leaves[member.path]
            order = cut.order(axes)
            stays = [cut.stays(axes, i) for i in order]
            table = self._score_member(group, member, stays)
            if table is not None:
                _check_finite(table, group, member)
                normalised = _normalise(table, self.normalise)
                tables.append(normalised)
        if not tables:
            raise ValueError(
                f'{group.name}: no member of the group has a score ({self.scores.name}); leave the group alone with '
                f'leave={group.name!r}, or take another score'
            )
        reduce_members = REDUCTIONS[self.reduce]
        return reduce_members(np.stack(tables), axis=0)

    def _score_member(
        self, group: Group, member: Member, stays: Sequence[np.ndarray]
    ) -> Table | None:
        axes = self.leaves[member.path]
        layout = _find_layout(group, member, axes)
        if self.scores.of_channels is not None:
            return self._score_by_function(group, member, stays, layout)
        of_weights = self.scores.by_path.get(member.path)
        if of_weights is None:
            return None
        other_axes = all_but(layout.axes, axes)
        sums = sum_over(of_weights, stays, tuple(other_axes))
        sums = np.asarray(sums, np.float64).ravel()
        return sums[layout.positions].sum(axis=-1)

    def _score_by_function(
        self, group: Group, member: Member, stays: Sequence[np.ndarray], layout: '_Layout'
    ) -> Table | None:
        """Asks the function for the scores of each list of channels."""
        score_channels = self.scores.of_channels
        assert score_channels is not None
        matrices = {}
        for name, by_path in self.scores.arrays.items():
            leaf = by_path[member.path]
            if leaf is None:  # it has no gradient
                return None
            matrices[name] = _as_rows(_zeroed(leaf, stays), layout)
        table = np.empty(layout.positions.shape[:-1])
        owner_sizes = table.shape[:-1]
        for index in np.ndindex(*owner_sizes):
            matrices_of_list = {name: rows[index] for name, rows in matrices.items()}
            scores = score_channels(group, member, matrices_of_list)
            if scores is None:
                return None
            table[index] = scores
        return table


@functools.partial(jax.jit, static_argnums=2)
def sum_over(scores: Any, stays: Sequence[Any], axes: tuple[int, ...]) -> jax.Array:
    """Sums scores of a leaf. Sharded arrays are not gathered."""
    array = jnp.asarray(scores)
    dtype = tree_lib.at_least_float32(array.dtype)
    zeroed = _zeroed(array, stays)
    return jnp.sum(zeroed, axis=axes, dtype=dtype)


def _zeroed(leaf: jax.Array, stays: Sequence[Any]) -> jax.Array:
    for flags in stays:
        leaf = jnp.where(flags, leaf, jnp.zeros_like(leaf))
    return leaf


class _Layout(NamedTuple):
    """Where the channels of a member lie.

    Attributes:
      axes: the axes of the leaf along which channels or owners of their lists lie.
      positions: among the elements along these axes, of shape `(*owners, channels, positions of one channel)`.
    """

    axes: tuple[int, ...]
    positions: np.ndarray


def _find_layout(group: Group, member: Member, axes: Axes) -> _Layout:
    """Sorts the elements along a member's axes by owner and channel.

    Take a leaf of 2 rows and 3 columns. The rows are 2 channels, the columns are 3 layers of a scan. Each layer may
    keep channels of its own, so it owns a list. The elements are counted row by row:

        position   0  1  2  3  4  5
        channel    0  0  0  1  1  1
        owner      0  1  2  0  1  2
        number     0  2  4  1  3  5     owner * 2 + channel: the place in a table of shape (owners, channels)

    Sorted by number the positions are 0, 3, 1, 4, 2, 5. In shape `(*owners, channels, 1)` they are
    [[[0], [3]], [[1], [4]], [[2], [5]]]. So the list of layer 1 lies at positions 1 and 4.
    """
    owners = resolve_each(group.lists)
    owner_axes = [_axis_with(owner, axes) for owner in owners]
    along = sorted({member.axis, *owner_axes})
    shape = sizes_of(pick(axes, along))

    def spread(indices: np.ndarray, axis: int) -> np.ndarray:
        """Repeats indices along one axis for each element along all of them, as a flat array."""
        sizes = [1] * len(along)
        sizes[along.index(axis)] = -1
        return np.broadcast_to(indices.reshape(sizes), shape).ravel()

    channel_along_axis = np.full(axes[member.axis].size, -1)  # -1: an element of no channel
    channel_along_axis[member.positions()] = np.arange(group.size)[:, None]
    channels = spread(channel_along_axis, member.axis)
    positions = np.flatnonzero(channels >= 0)
    indices = []
    for owner, axis in zip(owners, owner_axes, strict=True):
        (along_axis,) = indices_of(owner, axes[axis])  # a value has each owner once
        indices.append(spread(along_axis, axis)[positions])
    indices.append(channels[positions])
    sizes = (*sizes_of(owners), group.size)
    numbers = np.ravel_multi_index(tuple(indices), sizes)
    by_number = np.argsort(numbers, kind='stable')
    positions = positions[by_number].reshape(*sizes, -1)
    return _Layout(tuple(along), positions)


def _axis_with(owner: Axis, axes: Axes) -> int:
    for i, axis in enumerate(axes):
        if owner in atoms(axis):
            return i
    raise AssertionError(f'a leaf of axes {axes} has channels, but no owner of their lists')


def _as_rows(leaf: jax.Array, layout: _Layout) -> jax.Array:
    """The weights of each channel, of shape `(*owners, channels, weights of one)`."""
    count = len(layout.axes)
    moved = jnp.moveaxis(leaf, layout.axes, range(count))
    other_sizes = moved.shape[count:]
    rows = moved.reshape(-1, *other_sizes)[layout.positions]
    *channels, _ = layout.positions.shape
    return rows.reshape(*channels, -1)


def _check_finite(table: Table, group: Group, member: Member) -> None:
    not_finite = np.argwhere(~np.isfinite(table))
    if len(not_finite):
        index = tuple(not_finite[0])
        score = table[index]
        raise ValueError(
            f'the score of channel {index[-1]} of {group.name} is {score} for {member.name}; look for NaN or inf in '
            'that leaf, in the gradients and in the batches'
        )


def _normalise(table: Table, normalise: str | Normalise | None) -> Table:
    if normalise is None:
        return table
    function = NORMALISATIONS[normalise] if isinstance(normalise, str) else normalise
    return function(table)
