"""Scores of channels: one number for each channel, from the scores of its weights in all members of its group.

    member  ('up', axis 1), scores of weights  [[1, 4], [2, 3]]   sum for each channel   [3, 7]
    member  ('bias', axis 0)                   [1, 0]                                    [1, 0]

The sums of each member are divided by their mean, which gives [0.6, 1.4] and [2, 0]. Then the members are added:
[2.6, 1.4]. Where `Group.lists` has atoms, such as layers of a scan, there is such a row for each of their indices.

An algorithm of the library scores each weight of each leaf. A function gets the matrix whose rows are a group's
channels, and returns a score for each row or for each weight.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import api, checks, oneshot
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.structure.axes import Axes, atoms, indices_of, pick, sizes_of
from jaxpruner.structure.cut import Cut
from jaxpruner.structure.groups import Group, Member
from jaxpruner.trace.views import all_but
from jaxpruner.tree import Path, PyTree

Table = np.ndarray
Normalise = Callable[[Table], Table]


def _over(scale: Callable[[Table], Any]) -> Normalise:
    """Divides a table by its scale. A table with a scale of zero stays as it is."""

    def divide(table: Table) -> Table:
        divisor = scale(table)
        return table / divisor if divisor > 0 else table

    return divide


NORMALISATIONS: Mapping[str | None, Normalise] = {
    'mean': _over(lambda table: np.abs(table).mean()),
    'max': _over(lambda table: np.abs(table).max()),
    'standard': lambda table: _over(np.std)(table - table.mean()),
    None: lambda table: table,
}
REDUCTIONS: Mapping[str, Callable[..., Table]] = {'sum': np.sum, 'mean': np.mean, 'max': np.max}


class _Layout(NamedTuple):
    """Where the channels of a member lie.

    Attributes:
      axes: the axes of the leaf along which channels or owners of their lists lie.
      positions: among the elements along these axes, of shape `(*owners, channels, positions of one channel)`.
    """

    axes: tuple[int, ...]
    positions: np.ndarray

    @classmethod
    def of(cls, group: Group, member: Member, axes: Axes) -> '_Layout':
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
        channels = np.full(axes[member.axis].size, -1)  # -1: an element of no channel
        channels[member.positions()] = np.arange(group.size)[:, None]
        indices = []  # of owners, then of channels, with the axes along which they lie
        for owner in group.lists:
            owner = owner.resolved()
            axis = next(i for i, axis in enumerate(axes) if owner in atoms(axis))
            (index,) = indices_of(owner, axes[axis])  # a value has each owner once
            indices.append((axis, index))
        indices.append((member.axis, channels))
        along = sorted({axis for axis, _ in indices})
        shape = sizes_of(pick(axes, along))
        spread = []
        for axis, index in indices:
            shape_of_index = [-1 if other == axis else 1 for other in along]
            spread.append(np.broadcast_to(index.reshape(shape_of_index), shape).ravel())
        positions = np.flatnonzero(spread[-1] >= 0)
        sizes = (*sizes_of(group.lists), group.size)
        numbers = np.ravel_multi_index([index[positions] for index in spread], sizes)
        by_number = np.argsort(numbers, kind='stable')
        return cls(tuple(along), positions[by_number].reshape(*sizes, -1))


# Of one member: (group, member, its layout, flags of the weights that stay) -> a table; `None` for no score.
ScoreMember = Callable[[Group, Member, _Layout, Sequence[np.ndarray]], Table | None]


class Scorer(NamedTuple):
    """Makes scores of channels from scores of weights.

    Attributes:
      leaves: the axes of each leaf by its path.
      name: of the score, for messages.
      score_member: scores the channels of one member.
      reduce: how members are added up, a name of `REDUCTIONS`.
      normalise: what each member's table is divided by before; a name of `NORMALISATIONS`, a function of the table, or
        `None`.
    """

    leaves: Mapping[Path, Axes]
    name: str
    score_member: ScoreMember
    reduce: str
    normalise: str | Normalise | None

    def score(self, group: Group, cut: Cut) -> Table:
        """The scores of a group's channels, of shape `(*sizes of Group.lists, channels)`.

        Weights that the cut removes count as zero.

        Raises:
          ValueError: a score is not finite, or no member has a score.
        """
        normalise = self.normalise if callable(self.normalise) else NORMALISATIONS[self.normalise]
        tables = []
        for member in group.members:
            axes = self.leaves[member.path]
            stays = [cut.stays(axes, i) for i in cut.order(axes)]
            table = self.score_member(group, member, _Layout.of(group, member, axes), stays)
            if table is None:
                continue
            not_finite = np.argwhere(~np.isfinite(table))
            if len(not_finite):
                index = tuple(not_finite[0])
                raise ValueError(
                    f'the score of channel {index[-1]} of {group.name} is {table[index]} for {member.name}; look for '
                    'NaN or inf in that leaf, in the gradients and in the batches'
                )
            tables.append(normalise(table))
        if not tables:
            raise ValueError(
                f'{group.name}: no member of the group has a score ({self.name}); leave the group alone with '
                f'leave={group.name!r}, or take another score'
            )
        return REDUCTIONS[self.reduce](np.stack(tables), axis=0)


@functools.partial(jax.jit, static_argnums=2)
def sum_over(scores: Any, stays: Sequence[Any], axes: tuple[int, ...]) -> jax.Array:
    """Sums scores of a leaf. Sharded arrays are not gathered."""
    zeroed = _zeroed(jnp.asarray(scores), stays)
    return jnp.sum(zeroed, axis=axes, dtype=tree_lib.at_least_float32(zeroed.dtype))


def _zeroed(leaf: jax.Array, stays: Sequence[Any]) -> jax.Array:
    for flags in stays:
        leaf = jnp.where(flags, leaf, jnp.zeros_like(leaf))
    return leaf


def read_score(
    score: Any,
    params: PyTree,
    apply_fn: Callable[..., Any],
    gradients: PyTree | None = None,
    batches: Iterable[Any] | None = None,
    progress: bool = True,
) -> tuple[str, ScoreMember]:
    """Reads the setting `score` of `ChannelGraph.choose`: its name, and what scores a member.

    Raises:
      TypeError: the setting is of no allowed type.
      ValueError: the algorithm is unknown or has no scores, or gradients or batches are missing.
    """
    if isinstance(score, str):
        score = api.create_updater_from_config({'algorithm': score})
    by_path = None
    name = 'a tree of scores'
    if isinstance(score, oneshot.CalibratedPruning):
        name = type(score).__name__
        by_path = _calibrated(score, params, apply_fn, batches, progress)
    elif isinstance(score, BaseUpdater):
        name = type(score).__name__
        by_path = _by_algorithm(score, params, gradients)
    else:
        by_path = _as_tree(score, params)
        if by_path is None and callable(score):
            return _by_function(score, params, gradients)
        if by_path is None:
            raise TypeError(
                "score is the name of an algorithm such as 'magnitude', an algorithm such as "
                'jaxpruner.RandomPruning(rng_seed=1), a tree of arrays like the parameters, or a function of the '
                f'matrix whose rows are channels; got {score!r}'
            )

    def score_member(
        group: Group, member: Member, layout: _Layout, stays: Sequence[np.ndarray]
    ) -> Table | None:
        of_weights = by_path.get(member.path)
        if of_weights is None:
            return None
        other_axes = all_but(layout.axes, np.shape(of_weights))
        sums = np.asarray(sum_over(of_weights, stays, tuple(other_axes)), np.float64)
        return sums.ravel()[layout.positions].sum(axis=-1)

    return name, score_member


def _as_tree(score: Any, params: PyTree) -> dict[Path, Any] | None:
    """The arrays of a tree like the parameters; `None` if it is no such tree."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    try:
        entries = tree_lib.leaves_like(treedef, score)
    except ValueError:
        return None
    by_path = {}
    for path, leaf, entry in zip(paths, leaves, entries, strict=True):
        if entry is not None:
            by_path[path] = entry
            if np.shape(entry) != np.shape(leaf):
                return None
    return by_path


def _by_algorithm(
    algorithm: BaseUpdater, params: PyTree, gradients: PyTree | None
) -> dict[Path, Any]:
    name = type(algorithm).__name__
    if isinstance(algorithm, oneshot.PruningAtInitialization):
        raise ValueError(
            f"{name} takes derivatives of its own and scores no channels; score='saliency' with gradients=… scores "
            'them by weights times gradients'
        )
    try:
        scores = algorithm.calculate_scores(params, grads=gradients)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f'{name} has no scores for these parameters ({error}); scores by gradients need gradients=…, and '
            'scores that are gathered in training are not available here'
        ) from error
    paths, leaves, _ = tree_lib.flatten_with_paths(scores)
    return {path: leaf for path, leaf in zip(paths, leaves, strict=True) if leaf is not None}


def _calibrated(
    algorithm: Any,
    params: PyTree,
    apply_fn: Callable[..., Any],
    batches: Iterable[Any] | None,
    progress: bool,
) -> dict[Path, Any]:
    """Scores of leaves that the model reads matrices from, by the inputs of these matrices."""
    name = type(algorithm).__name__
    if not hasattr(algorithm, 'score_matrices'):
        raise ValueError(f"{name} scores no weights by themselves; take 'wanda' or 'ria'")
    if batches is None:
        raise ValueError(
            f'{name} looks at the inputs of each layer: give batches=…, or make the graph with arrays for inputs'
        )
    calibration = oneshot.calibrate(apply_fn, params, batches, progress=progress)
    scores = {}
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if path in calibration:
            parts = []
            for matrices, statistics in calibration[path]:
                of_matrices = algorithm.score_matrices(
                    matrices.read(leaf), statistics.second_moment
                )
                parts.append(matrices.write(of_matrices, leaf))
            scores[path] = sum(parts)
    return scores


def _by_function(
    function: Callable[..., Any], params: PyTree, gradients: PyTree | None
) -> tuple[str, ScoreMember]:
    name = getattr(function, '__name__', repr(function))
    names_gradients = 'gradients' in checks.known_arguments(function, {'gradients': None})
    if names_gradients and gradients is None:
        raise ValueError(f'{name} scores by gradients, and there are none; give gradients=…')
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    arrays = {'weights': dict(zip(paths, leaves, strict=True))}
    if gradients is not None:
        entries = tree_lib.leaves_like(treedef, gradients)
        arrays['gradients'] = dict(zip(paths, entries, strict=True))

    def score_member(
        group: Group, member: Member, layout: _Layout, stays: Sequence[np.ndarray]
    ) -> Table | None:
        """Asks the function for the scores of each list of channels."""
        rows = {}  # the weights of each channel, of shape `(*owners, channels, weights of one)`
        *shape, _ = layout.positions.shape
        for key, by_path in arrays.items():
            if by_path[member.path] is None:  # it has no gradient
                return None
            leaf = _zeroed(by_path[member.path], stays)
            count = len(layout.axes)
            moved = jnp.moveaxis(leaf, layout.axes, range(count))
            elements = moved.reshape(-1, *moved.shape[count:])
            rows[key] = elements[layout.positions].reshape(*shape, -1)
        table = np.empty(shape)
        for index in np.ndindex(*shape[:-1]):
            offered = {'group': group, 'member': member}
            offered |= {key: matrix[index] for key, matrix in rows.items()}
            weights = offered.pop('weights')
            scores = function(weights, **checks.known_arguments(function, offered))
            if scores is None:
                return None
            if jnp.shape(scores) not in (weights.shape, weights.shape[:1]):
                raise ValueError(
                    f'{member.name}: score gets {weights.shape[0]} channels of {weights.shape[1]} weights, and returns '
                    f'one number for each channel or each weight; got shape {jnp.shape(scores)}'
                )
            scores = np.asarray(scores, np.float64)
            table[index] = scores if scores.ndim == 1 else scores.sum(axis=1)
        return table

    return name, score_member
