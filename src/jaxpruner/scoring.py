"""Scores that are a function of each weight by itself, such as magnitudes, need not be written down to be ranked."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxpruner import selection
from jaxpruner import tree as tree_lib

Method = TypeVar('Method', bound=Callable[..., Any])
_MARK = 'score_of_each_weight'


def of_each_weight(function: Callable[[jax.Array], jax.Array]) -> Callable[[Method], Method]:
    """Says of a method `calculate_scores` that it scores each weight by a function of that weight alone.

    Masks are then made from the weights: a pass that reads them computes the scores, which take no memory. A subclass
    that overrides the method has to say so again, or its scores are arrays like any others.

    Args:
      function: of an array of weights, to scores of its shape and dtype; hashable.

    Returns:
      A decorator that leaves the method as it is.

    >>> import jaxpruner
    >>> class Largest(jaxpruner.BaseUpdater):  # negative weights go first
    ...     @of_each_weight(jnp.positive)
    ...     def calculate_scores(self, params, sparse_state=None, grads=None):
    ...         return params
    >>> updater = Largest(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> updater.instant_sparsify({'w': jnp.array([-2.0, 1.0])})[1]
    {'w': Array([0, 1], dtype=uint8)}
    """

    def mark(method: Method) -> Method:
        setattr(method, _MARK, function)
        return method

    return mark


def function_of(method: Callable[..., Any]) -> Callable[[jax.Array], jax.Array] | None:
    """What `of_each_weight` said of a method; `None` where it said nothing.

    Args:
      method: `calculate_scores` of an updater.

    >>> import jaxpruner
    >>> function_of(jaxpruner.MagnitudePruning().calculate_scores) is jnp.abs
    True
    """
    return getattr(method, _MARK, None)


def each_weight(params: tree_lib.PyTree, function: Callable[[jax.Array], jax.Array]) -> tree_lib.PyTree:
    """Scores of each weight by itself, not written down where that can be.

    Args:
      params: any pytree.
      function: as in `of_each_weight`.

    Returns:
      A tree like the parameters: `selection.Scores` of arrays of floats, arrays of scores of other numbers, `None` for
      leaves that are no arrays of numbers, such as random keys.

    >>> scores = each_weight({'w': jnp.array([-2.0]), 'n': jnp.array([-3]), 'key': jax.random.key(0)}, jnp.abs)
    >>> type(scores['w']).__name__, scores['n'].tolist(), scores['key']
    ('Scores', [3], None)
    """

    def score(leaf: Any) -> Any:
        dtype = getattr(leaf, 'dtype', None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.number):
            return None
        return selection.Scores(leaf, function) if jnp.issubdtype(dtype, jnp.floating) else function(leaf)

    return jax.tree.map(score, params)


def written_down(scores: tree_lib.PyTree) -> tree_lib.PyTree:
    """A tree of scores as arrays.

    Args:
      scores: from `each_weight`.

    >>> written_down(each_weight({'w': jnp.array([-2.0])}, jnp.abs))
    {'w': Array([2.], dtype=float32)}
    """
    return jax.tree.map(selection.read, scores, is_leaf=_is_leaf)


def flatten(scores: tree_lib.PyTree) -> tuple[list[tree_lib.Path], list[Any], Any]:
    """As `tree.flatten_with_paths`, of a tree of scores, `selection.Scores` or `None`.

    Args:
      scores: as `each_weight` or `calculate_scores` returns them.

    >>> paths, leaves, _ = flatten(each_weight({'w': jnp.array([-2.0]), 'key': jax.random.key(0)}, jnp.abs))
    >>> paths, leaves[0], type(leaves[1]).__name__
    ([('key',), ('w',)], None, 'Scores')
    """
    return tree_lib.flatten_with_paths(scores, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, selection.Scores)
