"""Lazy scores: an elementwise function of weights (or gradients) in place of an array.

As arrays, the scores of a model take as much memory as its weights. Lazy scores are computed wherever they are read.
Only those that are pooled, short or ranked eagerly are materialised, a leaf at a time. An algorithm that scores each
weight by itself gives that function in a hook, beside the method that makes arrays: `elementwise_score` beside
`calculate_scores`. Masks are then made from the weights, and the method is not called for them.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.mask_calculator import selection

# From an array to scores of its shape and dtype; hashable, since programs are compiled for it.
ElementwiseFn = Callable[[jax.Array], jax.Array]


def hook_describes(pruner: Any, hook: str, method: str) -> bool:
    """Tells whether a hook (or a flag) is defined in the same class as a method, or in a subclass of it.

    A subclass that overrides the method alone inherits a hook that describes the overridden method. That hook does not
    count. Nor does a hook count whose method was replaced later, on the object or on a class.

    >>> class Magnitude:
    ...     def scores(self, weights): ...
    ...     def score(self): ...
    >>> class OwnScores(Magnitude):  # the inherited hook describes the other scores
    ...     def scores(self, weights): ...
    >>> class OwnScoresAndScore(OwnScores):
    ...     def score(self): ...
    >>> pruners = Magnitude(), OwnScores(), OwnScoresAndScore()
    >>> [hook_describes(pruner, 'score', 'scores') for pruner in pruners]
    [True, False, True]
    """
    if method in vars(pruner):
        return False
    for base in type(pruner).__mro__:
        has_method = method in vars(base)
        if has_method and not _is_written_in(base, vars(base)[method]):
            return False
        if hook in vars(base):
            return True
        if has_method:
            return False
    return False


def _is_written_in(cls: type, function: Any) -> bool:
    """Whether a function stands in the body of a class, rather than assigned to it later."""
    function = getattr(function, '__func__', function)  # of a staticmethod
    # The name of the code: that of the function is copied by `functools.wraps`.
    name = getattr(getattr(function, '__code__', None), 'co_qualname', '')
    return name.startswith(f'{cls.__qualname__}.')


def from_function(
    params: tree_lib.PyTree, function: ElementwiseFn, hook: str = 'elementwise_score'
) -> tree_lib.PyTree:
    """Scores each leaf by an elementwise function: lazily for floats, as arrays for other numbers, else `None`.

    Raises:
      TypeError: what the hook returned is no hashable function.
      ValueError: the scores of a leaf have another shape or dtype than the leaf.
    """
    if not callable(function) or not isinstance(function, Hashable):
        raise TypeError(f'{hook} must return a hashable function of an array, got {function!r}')
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    scores = []
    for path, leaf in zip(paths, leaves, strict=True):
        dtype = getattr(leaf, 'dtype', None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.number):
            scores.append(None)
        elif not jnp.issubdtype(dtype, jnp.floating):
            scores.append(function(leaf))
        else:
            _check_result(function, leaf, path, hook)
            scores.append(selection.Scores(leaf, function))
    return tree_lib.unflatten(treedef, scores, leaves)


def _check_result(function: ElementwiseFn, leaf: Any, path: tree_lib.Path, hook: str) -> None:
    result = jax.eval_shape(function, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if (result.shape, result.dtype) != (leaf.shape, leaf.dtype):
        raise ValueError(
            f'{tree_lib.path_string(path)}: elementwise scores must have the shape and dtype of the leaf, '
            f'{leaf.dtype}{list(leaf.shape)}, got {result.dtype}{list(result.shape)} from {function!r}; '
            f'let {hook} return None'
        )


def materialize(scores: tree_lib.PyTree) -> tree_lib.PyTree:
    """Computes a tree of scores as arrays."""
    return jax.tree.map(selection.read, scores, is_leaf=_is_leaf)


def flatten(scores: tree_lib.PyTree) -> tuple[list[tree_lib.Path], list[Any], Any]:
    """Flattens a tree of arrays, lazy scores or `None`, as `tree.flatten_with_paths` does."""
    return tree_lib.flatten_with_paths(scores, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, selection.Scores)
