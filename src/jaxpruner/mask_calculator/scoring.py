"""Scores that are a function of each weight, or gradient, by itself need not be written down to be ranked."""

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.mask_calculator import selection

if TYPE_CHECKING:
    from jaxpruner.base_updater import BaseUpdater

Method = TypeVar('Method', bound=Callable[..., Any])
_OF_EACH_WEIGHT, _OF_EACH_GRADIENT = 'scores_of_each_weight', 'scores_of_each_gradient'
_RANKS_UNWRITTEN = 'ranks_unwritten_scores'


def of_each_weight(function: Callable[[jax.Array], jax.Array]) -> Callable[[Method], Method]:
    """Says of `calculate_scores` (or what SET and RigL drop and grow by) that it is a function of each weight alone.

    Masks are then made from the weights, and the method is not called for them: a pass that reads weights computes the
    scores, and unstructured masks of floats of 16 bits or more take no memory for scores. A subclass that overrides the
    method, or the making of masks, is asked for arrays again.

    Args:
      function: of an array of weights, to scores of its shape and dtype; hashable, and one function, not made anew each
        time. It has to round alike wherever it is compiled, as single operations do.

    Returns:
      A decorator.

    Raises:
      TypeError: what is given is no hashable function.

    >>> import jaxpruner
    >>> class Largest(jaxpruner.BaseUpdater):  # negative weights go first
    ...     @of_each_weight(jnp.positive)
    ...     def calculate_scores(self, params, sparse_state=None, grads=None):
    ...         return params
    >>> updater = Largest(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> updater.instant_sparsify({'w': jnp.array([-2.0, 1.0])})[1]
    {'w': Array([0, 1], dtype=uint8)}
    """
    return _marks(_OF_EACH_WEIGHT, 'of_each_weight', function)


def of_each_gradient(function: Callable[[jax.Array], jax.Array]) -> Callable[[Method], Method]:
    """Says of `get_drop_scores` or `get_grow_scores` that it scores each weight by a function of its gradient alone.

    Args:
      function: of an array of gradients, as that of `of_each_weight`, which these methods may have instead.

    Returns:
      A decorator.

    Raises:
      TypeError: what is given is no hashable function.

    >>> import jaxpruner
    >>> class MostNegative(jaxpruner.RigL):
    ...     @of_each_gradient(jnp.negative)
    ...     def get_grow_scores(self, sparse_state, params, grads):
    ...         return jax.tree.map(jnp.negative, grads)
    >>> params = grads = {'w': jnp.array([2.0])}
    >>> said_of(MostNegative().get_grow_scores, params, grads)['w'].of is jnp.negative
    True
    """
    return _marks(_OF_EACH_GRADIENT, 'of_each_gradient', function)


def _marks(mark: str, name: str, function: Any) -> Callable[[Method], Method]:
    if not callable(function) or not isinstance(function, Hashable):
        raise TypeError(f'{name} takes a hashable function of an array, got {function!r}')
    return lambda method: _marked(method, mark, function)


def ranks_unwritten(method: Method) -> Method:
    """Says of a method that makes masks that it takes `selection.Scores`, too.

    >>> import jaxpruner
    >>> takes_unwritten(jaxpruner.MagnitudePruning.create_masks)
    True
    """
    return _marked(method, _RANKS_UNWRITTEN, True)


def function_of(method: Callable[..., Any]) -> Callable[[jax.Array], jax.Array] | None:
    """What `of_each_weight` said of a method; `None` where it said nothing.

    Args:
      method: `calculate_scores` of an updater.

    >>> import jaxpruner
    >>> function_of(jaxpruner.MagnitudePruning().calculate_scores) is jnp.abs
    True
    """
    return _said_of(method, _OF_EACH_WEIGHT)


def said_of(
    method: Callable[..., Any], params: tree_lib.PyTree, grads: tree_lib.PyTree
) -> tree_lib.PyTree | None:
    """Scores as `of_each_weight` or `of_each_gradient` says them of a method; `None` where neither does.

    Args:
      method: that of an updater.
      params: the parameters.
      grads: their gradients.

    >>> import jaxpruner
    >>> said_of(jaxpruner.SET().get_drop_scores, {'w': jnp.array([-2.0])}, None)['w'].of is jnp.abs
    True
    """
    function = function_of(method)
    if function is not None:
        return each_weight(params, function)
    function = _said_of(method, _OF_EACH_GRADIENT)
    if function is None:
        return None
    # Gradients may come in containers of another kind than the parameters.
    treedef = tree_lib.flatten_with_paths(params)[2]
    grads = jax.tree.unflatten(treedef, tree_lib.leaves_like(treedef, grads))
    return each_weight(grads, function, 'of_each_gradient')


def takes_unwritten(method: Callable[..., Any]) -> bool:
    """Whether `ranks_unwritten` was said of a method.

    >>> takes_unwritten(print)
    False
    """
    return _said_of(method, _RANKS_UNWRITTEN) is True


def _marked(method: Method, name: str, value: Any) -> Method:
    @functools.wraps(method)
    def marked(*arguments: Any, **named: Any) -> Any:
        return method(*arguments, **named)

    setattr(marked, name, (marked, value))
    return cast(Method, marked)


def _said_of(method: Callable[..., Any], name: str) -> Any:
    function = getattr(method, '__func__', method)
    mark = getattr(function, name, None)
    # What wraps a marked function has its attributes, and may do something else.
    return mark[1] if isinstance(mark, tuple) and mark[0] is function else None


def each_weight(
    params: tree_lib.PyTree,
    function: Callable[[jax.Array], jax.Array],
    mark: str = 'of_each_weight',
) -> tree_lib.PyTree:
    """Scores of each weight by itself, not written down where that can be.

    Args:
      params: any pytree.
      function: as in `of_each_weight`.
      mark: who said so, for messages.

    Returns:
      A tree like the parameters: `selection.Scores` of arrays of floats, arrays of scores of other numbers, `None` for
      leaves that are no arrays of numbers, such as random keys.

    Raises:
      ValueError: the scores of a leaf have another shape or dtype than its weights.

    >>> scores = each_weight({'w': jnp.array([-2.0]), 'n': jnp.array([-3]), 'key': jax.random.key(0)}, jnp.abs)
    >>> type(scores['w']).__name__, scores['n'].tolist(), scores['key']
    ('Scores', [3], None)
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)

    def score(path: tree_lib.Path, leaf: Any) -> Any:
        dtype = getattr(leaf, 'dtype', None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.number):
            return None
        if not jnp.issubdtype(dtype, jnp.floating):
            return function(leaf)
        found = jax.eval_shape(function, jax.ShapeDtypeStruct(leaf.shape, dtype))
        if (found.shape, found.dtype) != (leaf.shape, dtype):
            raise ValueError(
                f'{tree_lib.path_string(path)}: a score of each weight must have its shape and dtype, {dtype}'
                f'{list(leaf.shape)}, got {found.dtype}{list(found.shape)} from {function!r}; leave {mark} out'
            )
        return selection.Scores(leaf, function)

    return jax.tree.unflatten(treedef, [score(*entry) for entry in zip(paths, leaves, strict=True)])


def unwritten(updater: 'BaseUpdater', params: tree_lib.PyTree) -> tree_lib.PyTree | None:
    """An updater's scores as `each_weight` has them; `None` where they, or its masks, are made otherwise.

    Args:
      updater: whose `calculate_scores`, `create_masks` and `select_masks` are looked at.
      params: the parameters.

    >>> import jaxpruner
    >>> unwritten(jaxpruner.RandomPruning(), {'w': jnp.ones(2)}) is None
    True
    """
    function = function_of(updater.calculate_scores)
    if function is None or not all(
        map(takes_unwritten, (updater.create_masks, updater.select_masks))
    ):
        return None
    return each_weight(params, function)


def to_rank(updater: 'BaseUpdater', params: tree_lib.PyTree, *rest: Any) -> tree_lib.PyTree:
    """The scores for `updater.create_masks`: unwritten, or else from `updater.scores_now`.

    Args:
      updater: any.
      params: the parameters.
      *rest: what else `scores_now` takes.

    >>> import jaxpruner
    >>> type(to_rank(jaxpruner.MagnitudePruning(), {'w': jnp.ones(2)}, None, None, {})['w']).__name__
    'Scores'
    """
    scores = unwritten(updater, params)
    return updater.scores_now(params, *rest) if scores is None else scores


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
