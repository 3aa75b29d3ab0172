"""Scores of channels: what a group's members say of each of its channels, as one number.

    member  ('up', axis 1), scores of weights  [[1, 4], [2, 3]]   each channel sums its weights   [3, 7]
    member  ('bias', axis 0)                   [1, 0]                                            [1, 0]

Each member is divided by its mean, [0.6, 1.4] and [2, 0], and members are added: [2.6, 1.4]. Where `Group.lists` has
atoms, such as layers of a scan, there is such a row for each of their indices.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, all_but, atoms
from jaxpruner.structure.analysis.members import Group, Member
from jaxpruner.structure.analysis.positions import indices_of
from jaxpruner.structure.choosing.leaf_scores import LeafScores
from jaxpruner.structure.cutting.cut import Cut

Table = np.ndarray
Normalise = Callable[[Table], Table]


def _over(scale: Callable[[Table], Any]) -> Normalise:
    """Divides by a number of the table; a table of which that is zero stays."""

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
REDUCTIONS: Mapping[str, Callable[..., Table]] = {'sum': np.sum, 'mean': np.mean, 'max': np.max}


class Scorer(NamedTuple):
    """Makes scores of channels of scores of weights.

    Attributes:
      leaves: the axes of each leaf by its path.
      scores: of weights, or a function.
      reduce: over members, a name of `REDUCTIONS`.
      normalise: of each member's table before, a name of `NORMALISATIONS`, or a function of the table, or `None`.
    """

    leaves: Mapping[tree_lib.Path, Axes]
    scores: LeafScores
    reduce: str
    normalise: str | Normalise | None

    def score(self, group: Group, cut: Cut) -> Table:
        """The scores of a group's channels: of shape `(*sizes of Group.lists, channels)`.

        Weights that go with the cut count as zero.

        Raises:
          ValueError: a score is not finite, or no member has one.
        """
        tables = []
        for member in group.members:
            axes = self.leaves[member.path]
            stays = [cut.stays(axes, i) for i in cut.order(axes)]
            table = self._score_member(group, member, stays)
            if table is not None:
                _check_finite(table, group, member)
                tables.append(_normalise(table, self.normalise))
        if not tables:
            raise ValueError(
                f'{group.name}: no member of the group has a score ({self.scores.name}); leave the group alone with '
                f'leave={group.name!r}, or take another score'
            )
        return REDUCTIONS[self.reduce](np.stack(tables), axis=0)

    def _score_member(
        self, group: Group, member: Member, stays: Sequence[np.ndarray]
    ) -> Table | None:
        axes = self.leaves[member.path]
        places = _places(group, member, axes)
        of_channels = self.scores.of_channels
        if of_channels is None:
            of_weights = self.scores.by_path.get(member.path)
            if of_weights is None:
                return None
            sums = sum_over(of_weights, stays, tuple(all_but(places.axes, axes)))
            return np.asarray(sums, np.float64).ravel()[places.positions].sum(axis=-1)
        matrices = {}
        for name, by_path in self.scores.arrays.items():
            leaf = by_path[member.path]
            if leaf is None:  # it has no gradient
                return None
            matrices[name] = _as_rows(_zeroed(leaf, stays), places)
        table = np.empty(places.positions.shape[:-1])
        for index in np.ndindex(*table.shape[:-1]):
            own = {name: array[index] for name, array in matrices.items()}
            found = of_channels(group, member, own)
            if found is None:
                return None
            table[index] = found
        return table


@functools.partial(jax.jit, static_argnums=2)
def sum_over(scores: Any, stays: Sequence[Any], axes: tuple[int, ...]) -> jax.Array:
    """Sums scores of a leaf where it is: what is sharded is not gathered, and lazy scores are never materialised."""
    scores = jnp.asarray(scores.of(scores.weights) if hasattr(scores, 'of') else scores)
    dtype = jnp.promote_types(scores.dtype, jnp.float32)
    return jnp.sum(_zeroed(scores, stays), axis=axes, dtype=dtype)


def _zeroed(leaf: jax.Array, stays: Sequence[Any]) -> jax.Array:
    for flags in stays:
        leaf = jnp.where(flags, leaf, jnp.zeros_like(leaf))
    return leaf


class _Places(NamedTuple):
    """Where the channels of a member lie.

    Attributes:
      axes: of the leaf, along which channels or what owns their lists lie.
      positions: among the elements along these axes, of shape `(*owners, channels, positions of one channel)`.
    """

    axes: tuple[int, ...]
    positions: np.ndarray


def _places(group: Group, member: Member, axes: Axes) -> _Places:
    owners = [owner.resolved() for owner in group.lists]
    kept = {member.axis}
    owner_axes = []
    for owner in owners:
        owner_axes.append(_axis_with(owner, axes))
        kept.add(owner_axes[-1])
    order = sorted(kept)
    shape = tuple([axes[i].size for i in order])

    def along(indices: np.ndarray, axis: int) -> np.ndarray:
        sizes = [1] * len(order)
        sizes[order.index(axis)] = -1
        return np.broadcast_to(indices.reshape(sizes), shape).ravel()

    channel = np.full(axes[member.axis].size, -1)
    channel[member.positions()] = np.arange(group.size)[:, None]
    channels = along(channel, member.axis)
    flat = np.flatnonzero(channels >= 0)
    indices = []
    for owner, axis in zip(owners, owner_axes, strict=True):
        indices.append(along(indices_of(owner, axes[axis]), axis)[flat])
    indices.append(channels[flat])
    sizes = (*[owner.size for owner in owners], group.size)
    by_channel = np.argsort(np.ravel_multi_index(tuple(indices), sizes), kind='stable')
    return _Places(tuple(order), flat[by_channel].reshape(*sizes, -1))


def _axis_with(owner: Axis, axes: Axes) -> int:
    for i, axis in enumerate(axes):
        if owner in atoms(axis):
            return i
    raise AssertionError(f'a leaf of axes {axes} has channels, and not what owns their lists')


def _as_rows(leaf: jax.Array, places: _Places) -> jax.Array:
    """The weights of each channel: of shape `(*owners, channels, weights of one)`."""
    moved = jnp.moveaxis(leaf, places.axes, range(len(places.axes)))
    rest = moved.shape[len(places.axes) :]
    rows = moved.reshape(-1, *rest)[places.positions]
    return rows.reshape(*places.positions.shape[:-1], -1)


def _check_finite(table: Table, group: Group, member: Member) -> None:
    wrong = np.argwhere(~np.isfinite(table))
    if len(wrong):
        place = wrong[0]
        raise ValueError(
            f'the score of channel {place[-1]} of {group.name} is {table[tuple(place)]} for {member.name}; look for '
            'NaN or inf in that leaf, in the gradients and in the batches'
        )


def _normalise(table: Table, normalise: str | Normalise | None) -> Table:
    if normalise is None:
        return table
    function = NORMALISATIONS[normalise] if isinstance(normalise, str) else normalise
    return function(table)
