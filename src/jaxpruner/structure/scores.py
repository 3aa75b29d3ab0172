"""Scores of channels: one number for each channel, from the scores of its weights in all members of its group.

    member  ('up', axis 1), scores of weights  [[1, 4], [2, 3]]   sum for each channel   [3, 7]
    member  ('bias', axis 0)                   [1, 0]                                    [1, 0]

The sums of each member are divided by their mean, which gives [0.6, 1.4] and [2, 0]. Then the members are added:
[2.6, 1.4]. Where `Group.lists` has atoms, such as layers of a scan, there is such a row for each of their indices.

An algorithm of the library scores each weight of each leaf. A function gets the matrix whose rows are a group's
channels, and returns a score for each row or for each weight.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import api, checks, oneshot
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.structure.channel_tables import ChannelTable
from jaxpruner.structure.cut import Cut
from jaxpruner.structure.groups import Group, Member
from jaxpruner.structure.traces import Trace
from jaxpruner.tree import Path, PyTree

Normalise = Callable[[np.ndarray], np.ndarray]


# Takes the channels of a group, a member, and a function that zeroes what other groups remove from an array of the
# member's leaf. Returns scores in the shape of the table; `None` if the member has none.
ScoreMember = Callable[[ChannelTable, Member, Callable[[Any], jax.Array]], np.ndarray | None]


def divided_by_mean(table: np.ndarray) -> np.ndarray:
    """Divides scores by the mean of their magnitudes, if it is not zero."""
    mean = np.abs(table).mean()
    return table / mean if mean > 0 else table


class Scorer(NamedTuple):
    """Makes scores of channels from scores of weights.

    Attributes:
      trace: of the model.
      name: of the score, for messages.
      score_member: scores the channels of one member.
      normalise: changes the scores of each member before they are added; `None` leaves them.
    """

    trace: Trace
    name: str
    score_member: ScoreMember
    normalise: Normalise | None

    def score(self, group: Group, cut: Cut) -> np.ndarray:
        """The scores of a group's channels, of shape `(*sizes of Group.lists, channels)`.

        Weights that the cut removes count as zero.

        Raises:
          ValueError: a score is not finite, or no member has a score.
        """
        numbers = {path: number for number, path in enumerate(self.trace.paths)}
        table = ChannelTable.of(self.trace, group, numbers)
        of_members = []
        for member in group.members:
            axes = self.trace.leaves[numbers[member.path]]
            scores = self.score_member(table, member, functools.partial(cut.zero, axes=axes))
            if scores is None:
                continue
            not_finite = np.argwhere(~np.isfinite(scores))
            if len(not_finite):
                index = tuple(not_finite[0])
                raise ValueError(
                    f'the score of channel {index[-1]} of {group.name} is {scores[index]} for {member.name}; look for '
                    'NaN or inf in that leaf, in the gradients and in the batches'
                )
            of_members.append(self.normalise(scores) if self.normalise else scores)
        if not of_members:
            raise ValueError(
                f'{group.name}: no member of the group has a score ({self.name}); leave the group alone with '
                f'leave={group.name!r}, or take another score'
            )
        return np.sum(of_members, axis=0)


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
    name = type(score).__name__
    if isinstance(score, oneshot.CalibratedPruning):
        by_path = _calibrated(score, params, apply_fn, batches, progress)
    elif isinstance(score, BaseUpdater):
        by_path = _by_algorithm(score, params, gradients)
    else:
        name, by_path = 'a tree of scores', _as_tree(score, params)
        if by_path is None and callable(score):
            return _by_function(score, params, gradients)
        if by_path is None:
            raise TypeError(
                "score is the name of an algorithm such as 'magnitude', an algorithm such as "
                'jaxpruner.RandomPruning(rng_seed=1), a tree of arrays like the parameters, or a function of the '
                f'matrix whose rows are channels; got {score!r}'
            )

    def score_member(table: ChannelTable, member: Member, zero: Any) -> np.ndarray | None:
        if by_path.get(member.path) is None:
            return None
        of_weights = {member.path: zero(by_path[member.path])}
        return np.asarray(table.add_up(of_weights, member), np.float64)

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
    if checks.known_arguments(function, {'gradients': None}) and gradients is None:
        raise ValueError(f'{name} scores by gradients, and there are none; give gradients=…')
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    arrays = {'weights': dict(zip(paths, leaves, strict=True))}
    if gradients is not None:
        entries = tree_lib.leaves_like(treedef, gradients)
        arrays['gradients'] = dict(zip(paths, entries, strict=True))

    def score_member(table: ChannelTable, member: Member, zero: Any) -> np.ndarray | None:
        """Asks the function for the scores of each list of channels."""
        matrices = {}
        for key, by_path in arrays.items():
            if by_path[member.path] is None:  # it has no gradient
                return None
            matrices[key] = table.rows(zero(by_path[member.path]), member.path, member)
        scores = np.empty(table.shape)
        for index in np.ndindex(*scores.shape[:-1]):
            of_list = {key: matrix[index] for key, matrix in matrices.items()}
            weights = of_list.pop('weights')
            offered = {'group': table.group, 'member': member, **of_list}
            own = function(weights, **checks.known_arguments(function, offered))
            if own is None:
                return None
            if jnp.shape(own) not in (weights.shape, weights.shape[:1]):
                raise ValueError(
                    f'{member.name}: score gets {weights.shape[0]} channels of {weights.shape[1]} weights, and returns '
                    f'one number for each channel or each weight; got shape {jnp.shape(own)}'
                )
            own = np.asarray(own, np.float64)
            scores[index] = own if own.ndim == 1 else own.sum(axis=1)
        return scores

    return name, score_member
