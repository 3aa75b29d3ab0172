"""Scores of weights, from which scores of channels are made.

An algorithm of the library scores each weight of each leaf. A function gets the matrix whose rows are a group's
channels, and returns a score for each row or for each weight.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import api, checks, oneshot
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.structure.analysis.members import Group, Member
from jaxpruner.tree import Path, PyTree

ByPath = Mapping[Path, Any]
# (group, member, {'weights': matrix, 'gradients': matrix}) -> a number for each channel; `None` for no score
OfChannels = Callable[[Group, Member, Mapping[str, jax.Array]], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class LeafScores:
    """Scores of the weights of leaves, or a function that scores channels by their weights.

    Attributes:
      name: of the score, for messages.
      by_path: path of a leaf -> scores in its shape, an array or lazy scores; leaves without scores have no entry.
      of_channels: the function; `None` if `by_path` has the scores.
      arrays: name of the function's argument -> path of a leaf -> array.
    """

    name: str
    by_path: ByPath = dataclasses.field(default_factory=dict)
    of_channels: OfChannels | None = None
    arrays: Mapping[str, ByPath] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What scores are made of, besides the weights.

    Attributes:
      apply_fn: the model.
      gradients: a tree like the parameters, or `None`.
      batches: inputs of the model, or `None`.
      progress: whether calibration shows a progress bar.
    """

    apply_fn: Callable[..., Any]
    gradients: PyTree | None = None
    batches: Iterable[Any] | None = None
    progress: bool = True


def scores_of_leaves(score: Any, params: PyTree, evidence: Evidence) -> LeafScores:
    """Reads the setting `score`; see `ChannelGraph.choose`.

    Raises:
      TypeError: the setting is of no allowed type.
      ValueError: the algorithm is unknown or has no scores, or gradients or batches are missing.
    """
    if isinstance(score, str):
        score = api.create_updater_from_config({'algorithm': score})
    if isinstance(score, BaseUpdater):
        return _by_algorithm(score, params, evidence)
    by_path = _as_tree(score, params)
    if by_path is not None:
        return LeafScores('a tree of scores', by_path)
    if callable(score):
        return _by_function(score, params, evidence)
    raise TypeError(
        "score is the name of an algorithm such as 'magnitude', an algorithm such as jaxpruner.RandomPruning("
        'rng_seed=1), a tree of arrays like the parameters, or a function of the matrix whose rows are channels; got '
        f'{score!r}'
    )


def _as_tree(score: Any, params: PyTree) -> ByPath | None:
    """The arrays of a tree like the parameters; `None` if it is no such tree."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    try:
        entries = tree_lib.leaves_like(treedef, score)
    except ValueError:
        return None
    by_path = {}
    for path, leaf, entry in zip(paths, leaves, entries, strict=True):
        if entry is None:
            continue
        if np.shape(entry) != np.shape(leaf):
            return None
        by_path[path] = entry
    return by_path


def _by_algorithm(algorithm: BaseUpdater, params: PyTree, evidence: Evidence) -> LeafScores:
    name = type(algorithm).__name__
    if isinstance(algorithm, oneshot.CalibratedPruning):
        return LeafScores(name, _calibrated(algorithm, params, evidence))
    if isinstance(algorithm, oneshot.PruningAtInitialization):
        raise ValueError(
            f"{name} takes derivatives of its own and scores no channels; score='saliency' with gradients=… scores "
            'them by weights times gradients'
        )
    try:
        scores = algorithm.calculate_scores(params, grads=evidence.gradients)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f'{name} has no scores for these parameters ({error}); scores by gradients need gradients=…, and '
            'scores that are gathered in training are not available here'
        ) from error
    return LeafScores(name, _without_none(scores))


def _without_none(scores: PyTree) -> dict[Path, Any]:
    paths, leaves, _ = tree_lib.flatten_with_paths(scores)
    by_path = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf is not None:
            by_path[path] = leaf
    return by_path


def _calibrated(algorithm: Any, params: PyTree, evidence: Evidence) -> ByPath:
    """Scores of leaves that the model reads matrices from, by the inputs of these matrices."""
    score_matrices = getattr(algorithm, 'score_matrices', None)
    if score_matrices is None:
        raise ValueError(
            f"{type(algorithm).__name__} scores no weights by themselves; take 'wanda' or 'ria'"
        )
    if evidence.batches is None:
        raise ValueError(
            f'{type(algorithm).__name__} looks at the inputs of each layer: give batches=…, or make the graph with '
            'arrays for inputs'
        )
    calibration = oneshot.calibrate(
        evidence.apply_fn, params, evidence.batches, progress=evidence.progress
    )
    scores = {}
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if path in calibration:
            parts = []
            for matrices, statistics in calibration[path]:
                weights = matrices.read(leaf)
                scores_of_matrices = score_matrices(weights, statistics.second_moment)
                parts.append(matrices.write(scores_of_matrices, leaf))
            scores[path] = sum(parts)
    return scores


def _by_function(function: Callable[..., Any], params: PyTree, evidence: Evidence) -> LeafScores:
    name = getattr(function, '__name__', repr(function))
    names_gradients = 'gradients' in checks.known_arguments(function, {'gradients': None})
    if names_gradients and evidence.gradients is None:
        raise ValueError(f'{name} scores by gradients, and there are none; give gradients=…')
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    weights = dict(zip(paths, leaves, strict=True))
    arrays = {'weights': weights}
    if evidence.gradients is not None:
        gradients = tree_lib.leaves_like(treedef, evidence.gradients)
        arrays['gradients'] = dict(zip(paths, gradients, strict=True))

    def of_channels(
        group: Group, member: Member, matrices: Mapping[str, jax.Array]
    ) -> np.ndarray | None:
        offered: dict[str, Any] = {'group': group, 'member': member}
        if 'gradients' in matrices:
            offered['gradients'] = matrices['gradients']
        weights = matrices['weights']
        named = checks.known_arguments(function, offered)
        scores = function(weights, **named)
        if scores is None:
            return None
        shape = jnp.shape(scores)
        if shape not in (weights.shape, weights.shape[:1]):
            raise ValueError(
                f'{member.name}: score gets {weights.shape[0]} channels of {weights.shape[1]} weights, and returns one '
                f'number for each channel or each weight; got shape {shape}'
            )
        scores = np.asarray(scores, np.float64)
        return scores if scores.ndim == 1 else scores.sum(axis=1)

    return LeafScores(name, of_channels=of_channels, arrays=arrays)
