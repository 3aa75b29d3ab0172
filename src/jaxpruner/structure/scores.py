"""Scores of channels: one number for each channel, from the scores of its weights in all members of its group.

    member  ('up', axis 1), scores of weights  [[1, 4], [2, 3]]   sum for each channel   [3, 7]
    member  ('bias', axis 0)                   [1, 0]                                    [1, 0]

The sums of each member are divided by their mean, which gives [0.6, 1.4] and [2, 0]. Then the members are added:
[2.6, 1.4]. Where `Group.lists` has atoms, such as layers of a scan, there is such a row for each of their indices.

An algorithm of the library scores each weight of each leaf. A function gets the matrix whose rows are a group's
channels, and returns a score for each row or for each weight.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpruner import api, checks, oneshot
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.structure.axes import Axes
from jaxpruner.structure.channel_tables import ChannelTable
from jaxpruner.structure.cut import Cut
from jaxpruner.structure.groups import Group, Member
from jaxpruner.structure.traces import Trace
from jaxpruner.tree import Path, PyTree

# Takes the channels of a group, a member, and a function that zeroes what other groups remove from an array of the
# member's leaf. Returns scores in the shape of the table; `None` if the member has none.
ScoreMember = Callable[[ChannelTable, Member, Callable[[Any], Any]], np.ndarray | None]


def score_group(trace: Trace, group: Group, cut: Cut, score_member: ScoreMember) -> np.ndarray:
    """The scores of a group's channels, of shape `(*sizes of Group.lists, channels)`.

    Weights that the cut removes count as zero.

    Raises:
      ValueError: a score is not finite, or no member has a score.
    """
    axes_of: dict[Path, Axes] = dict(trace.named_leaves)
    numbers = {path: number for number, path in enumerate(trace.paths)}
    table = ChannelTable.of(trace, group, numbers)
    total = None
    for member in group.members:
        axes = axes_of[member.path]
        scores = score_member(table, member, lambda value, axes=axes: cut.zero(value, axes))
        if scores is None:
            continue
        if not np.isfinite(scores).all():
            raise ValueError(
                f'scores of {group.name} for {member.name} are not finite; look for NaN or inf in that leaf, in the '
                'gradients and in the batches'
            )
        mean = np.abs(scores).mean()
        total = (0 if total is None else total) + (scores / mean if mean > 0 else scores)
    if total is None:
        raise ValueError(
            f'{group.name}: no member of the group has a score; leave the group alone with leave={group.name!r}, or '
            'take another score'
        )
    return total


def read_score(
    score: Any,
    params: PyTree,
    apply_fn: Callable[..., Any],
    gradients: PyTree | None,
    batches: Iterable[Any] | None,
    progress: bool,
) -> ScoreMember:
    """Reads the setting `score` of `ChannelGraph.choose`: makes what scores a member.

    Raises:
      TypeError: the setting is of no allowed type.
      ValueError: the algorithm is unknown or has no scores, or gradients or batches are missing.
    """
    if isinstance(score, str):
        score = api.create_updater_from_config({'algorithm': score})
    if not isinstance(score, BaseUpdater):
        if not callable(score):
            raise TypeError(
                "score is the name of an algorithm such as 'magnitude', an algorithm such as "
                'jaxpruner.RandomPruning(rng_seed=1), or a function of the matrix whose rows are channels; got '
                f'{score!r}'
            )
        return _by_function(score, params, gradients)
    name = type(score).__name__
    if hasattr(score, 'score_matrices'):
        scores = _calibrated(score, params, apply_fn, batches, progress)
    elif isinstance(score, oneshot.CalibratedPruning | oneshot.PruningAtInitialization):
        raise ValueError(f"{name} scores no channels; take 'wanda', or 'saliency' with gradients=…")
    else:
        try:
            of_weights = score.calculate_scores(params, grads=gradients)
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f'{name} has no scores for these parameters ({error}); scores by gradients need gradients=…, and '
                'scores that are gathered in training are not available here'
            ) from error
        paths, leaves, _ = tree_lib.flatten_with_paths(of_weights)
        scores = dict(zip(paths, leaves, strict=True))

    def score_member(table: ChannelTable, member: Member, zero: Any) -> np.ndarray | None:
        if scores.get(member.path) is None:
            return None
        of_weights = {member.path: zero(scores[member.path])}
        return np.asarray(table.add_up(of_weights, member), np.float64)

    return score_member


def _calibrated(
    algorithm: Any,
    params: PyTree,
    apply_fn: Callable[..., Any],
    batches: Iterable[Any] | None,
    progress: bool,
) -> dict[Path, Any]:
    """Scores of leaves that the model reads matrices from, by the inputs of these matrices."""
    if batches is None:
        raise ValueError(
            f'{type(algorithm).__name__} looks at inputs: give batches=…, or make the graph with arrays'
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
) -> ScoreMember:
    if checks.known_arguments(function, {'gradients': None}) and gradients is None:
        raise ValueError(f'{function} scores by gradients, and there are none; give gradients=…')
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
            own = checks.call(function, weights, group=table.group, member=member, **of_list)
            if own is None:
                return None
            if jnp.shape(own) not in (weights.shape, weights.shape[:1]):
                raise ValueError(
                    f'{member.name}: score gets {weights.shape[0]} channels of {weights.shape[1]} weights, and returns '
                    f'one number for each channel or each weight; got shape {jnp.shape(own)}'
                )
            scores[index] = np.asarray(own, np.float64).reshape(len(own), -1).sum(axis=1)
        return scores

    return score_member
