"""Scores of channels: one number for each channel, from the scores of its weights in all members of its group.

    member  ('up', axis 1), scores of weights  [[1, 4], [2, 3]]   sum for each channel   [3, 7]
    member  ('bias', axis 0)                   [1, 0]                                    [1, 0]

The sums of each member are divided by their mean, which gives [0.6, 1.4] and [2, 0]. Then the members are added:
[2.6, 1.4]. Where `Group.lists` has atoms, such as layers of a scan, there is such a row for each of their indices.

An algorithm of the library scores each weight of each leaf. A function gets the matrix whose rows are a group's
channels, and returns a score for each row or for each weight.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import api, checks, oneshot
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.structure.channel_tables import ChannelTable
from jaxpruner.structure.cut import Cut
from jaxpruner.structure.groups import Group, Member
from jaxpruner.structure.programs import Trace
from jaxpruner.tree import Path, PyTree


class Score(NamedTuple):
    """What scores channels.

    Attributes:
      function: of matrices whose rows are channels; `None` if the arrays are scores of weights.
      arrays: `'weights'`, and perhaps `'gradients'` -> path of a leaf -> an array of its shape, or `None`.
    """

    function: Callable[..., Any] | None
    arrays: Mapping[str, Mapping[Path, Any]]


def score_group(trace: Trace, group: Group, cut: Cut, score: Score) -> np.ndarray:
    """The scores of a group's channels, of shape `(*sizes of Group.lists, channels)`.

    Weights that the cut removes count as zero.

    Raises:
      ValueError: a score is not finite, or no member has a score.
    """
    table = ChannelTable.of(trace, group, {path: path for path in trace.leaves})
    of_members = []
    for member in group.members:
        arrays = {key: by_path.get(member.path) for key, by_path in score.arrays.items()}
        if any(array is None for array in arrays.values()):
            continue
        arrays = {key: cut.zero(array, trace.leaves[member.path]) for key, array in arrays.items()}
        if score.function is None:
            scores = table.add_up({member.path: arrays['weights']}, member)
        else:
            scores = _ask(score.function, table, member, arrays)
        if scores is None:
            continue
        scores = np.asarray(scores, np.float64)
        if not np.isfinite(scores).all():
            raise ValueError(
                f'scores of {group.name} for {member.name} are not finite; look for NaN or inf in that leaf, in the '
                'gradients and in the batches'
            )
        mean = np.abs(scores).mean()
        of_members.append(scores / mean if mean > 0 else scores)
    if not of_members:
        raise ValueError(
            f'{group.name}: no member of the group has a score; leave the group alone with leave={group.name!r}, or '
            'take another score'
        )
    return np.sum(of_members, axis=0)


def _ask(
    function: Callable[..., Any], table: ChannelTable, member: Member, arrays: Mapping[str, Any]
) -> np.ndarray | None:
    """Asks a function for the scores of each list of channels in a member; `None` if it has none."""
    matrices = {key: table.rows(array, member.path, member) for key, array in arrays.items()}
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


def read_score(
    score: Any,
    params: PyTree,
    apply_fn: Callable[..., Any],
    gradients: PyTree | None,
    batches: Iterable[Any] | None,
    progress: bool,
) -> Score:
    """Reads the setting `score` of `ChannelGraph.choose`.

    Raises:
      TypeError: the setting is of no allowed type.
      ValueError: the algorithm is unknown or has no scores, or gradients or batches are missing.
    """
    if isinstance(score, str):
        score = api.create_updater_from_config({'algorithm': score})
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    name, algorithm = type(score).__name__, score
    function, of_leaves = None, {'weights': leaves}
    if not isinstance(score, BaseUpdater):
        if not callable(score):
            raise TypeError(
                "score is an algorithm or its name, such as 'magnitude', or a function of the matrix whose rows are "
                f'channels; got {score!r}'
            )
        function = score
        if gradients is not None:
            of_leaves['gradients'] = tree_lib.leaves_like(treedef, gradients)
    elif hasattr(algorithm, 'score_matrices'):
        if batches is None:
            raise ValueError(f'{name} reads inputs: give batches=…, or make the graph with arrays')
        calibration = oneshot.calibrate(apply_fn, params, batches, progress=progress)
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            parts = []
            for matrices, statistics in calibration.get(path, ()):
                weights = matrices.read(leaf)
                of_matrices = algorithm.score_matrices(weights, statistics.second_moment)
                parts.append(matrices.write(of_matrices, leaf))
            leaves[i] = sum(parts) if parts else None
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
        of_leaves['weights'] = tree_lib.leaves_like(treedef, of_weights)
    by_path = {key: dict(zip(paths, own, strict=True)) for key, own in of_leaves.items()}
    return Score(function, by_path)
