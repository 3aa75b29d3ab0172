"""Which sparsity each leaf is to reach, checked before anything is computed, and which leaves are stacks of layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpruner import sparsity_distributions, utils
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import SparsityType

# A glob or a path, or several.
Stacked = str | Sequence[str | tree_lib.Path]


def check_distribution(function: Any) -> None:
    """Refuses what is no distribution. The usual one is a partial with numbers: wrong ones are refused here, too.

    Raises:
      TypeError, ValueError: it is no function, or its sparsity lies outside [0, 1].

    >>> check_distribution(None)
    """
    utils.check_callable('sparsity_distribution_fn', function)
    keywords = getattr(function, 'keywords', {})
    if 'sparsity' in keywords:
        sparsity_distributions.check_sparsity(keywords['sparsity'], 'sparsity')
    utils.check_callable('filter_fn', keywords.get('filter_fn'))
    sparsity_distributions.check_custom_map(keywords.get('custom_sparsity_map'))


def are_stacked(stacked: Stacked, paths: Sequence[tree_lib.Path]) -> list[bool]:
    """For each leaf whether its first axis counts layers.

    >>> are_stacked('blocks/*', [('blocks', 'kernel'), ('head', 'kernel')])
    [True, False]
    """
    return [any(tree_lib.matches(name, path) for name in _names(stacked)) for path in paths]


def of_leaves(
    distribution: Callable[..., tree_lib.PyTree] | None,
    params: tree_lib.PyTree,
    types: Sequence[SparsityType | None],
    stacked: Stacked,
    check: Callable[[SparsityType, tree_lib.Path, tuple[int, ...]], None],
) -> tree_lib.PyTree:
    """The target of each leaf.

    Args:
      distribution: from parameters (and the names of stacked leaves, if it takes them) to sparsities; `None` for none.
      params: the parameters, or their shapes.
      types: the sparsity type of each leaf, `None` where dense.
      stacked: names of leaves that are stacks of layers.
      check: refuses the type, path and shape (of one layer) of a leaf that is to be pruned.

    Returns:
      A tree like the parameters, `None` where dense.

    Raises:
      ValueError: a sparsity outside [0, 1], or a name without a leaf.

    >>> def half(params):
    ...     return {'w': 0.5, 'b': None}
    >>> from jaxpruner.sparsity_types import Unstructured
    >>> of_leaves(half, {'w': jax.numpy.ones(2), 'b': jax.numpy.ones(2)}, [Unstructured()] * 2, (), lambda *leaf: None)
    {'b': None, 'w': 0.5}
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    if distribution is None:
        return jax.tree.unflatten(treedef, [None] * len(leaves))
    names = _names(stacked)
    tree_lib.check_names(names, paths, 'stacked')
    with_stacked = {'stacked': names} if names else {}
    known = utils.known_arguments(distribution, with_stacked)
    if known != with_stacked:
        raise ValueError(
            'stacked layers change what a distribution selects, and this sparsity_distribution_fn takes no '
            'argument `stacked`; pass functools.partial(uniform, sparsity=…), or a function of params and stacked'
        )
    targets = tree_lib.leaves_like(treedef, distribution(params, **known))
    rows = zip(targets, types, paths, leaves, are_stacked(stacked, paths), strict=True)
    for i, (target, kind, path, leaf, in_layers) in enumerate(rows):
        if kind is None:
            targets[i] = None
        elif target is not None:
            sparsity_distributions.check_sparsity(target, f'the sparsity of {tree_lib.path_string(path)}')
            check(kind, path, leaf.shape[in_layers:])
    return jax.tree.unflatten(treedef, targets)


def _names(stacked: Stacked) -> tuple[str | tree_lib.Path, ...]:
    return (stacked,) if isinstance(stacked, str) else tuple(stacked)
