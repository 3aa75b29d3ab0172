"""Which sparsity each leaf is to reach, checked before anything is computed, and which leaves are stacks of layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_distributions
from jaxpruner.core import arguments, caller_warnings, vector_warnings
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_types import NByM, SparsityType

# A glob or a path, or several.
Stacked = str | Sequence[str | tree_lib.Path]
# A sparsity that is a rounded share of N:M, such as 0.33 for 2:3, does not contradict it.
_ROUNDING = 0.005


def check_distribution(function: Any) -> None:
    """Refuses what is no distribution. The usual one is a partial with numbers: wrong ones are refused here, too.

    Raises:
      TypeError, ValueError: it is no function, or its sparsity lies outside [0, 1].

    >>> check_distribution(None)
    """
    arguments.check_callable('sparsity_distribution_fn', function)
    keywords = getattr(function, 'keywords', {})
    if 'sparsity' in keywords:
        sparsity_distributions.check_sparsity(keywords['sparsity'], 'sparsity')
    arguments.check_callable('filter_fn', keywords.get('filter_fn'))
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
    types_decide: bool = True,
) -> tree_lib.PyTree:
    """The target of each leaf.

    Args:
      distribution: from parameters (and the names of stacked leaves, if it takes them) to sparsities; `None` for none.
      params: the parameters, or their shapes.
      types: the sparsity type of each leaf, `None` where dense.
      stacked: names of leaves that are stacks of layers.
      check: refuses the type, path and shape (of one layer) of a leaf that is to be pruned.
      types_decide: leaves of N:M have the share of N:M as their target: whatever other sparsity they are given, with a
        warning; and where nobody has given any. A sparsity of 0 keeps them dense.

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
    params = tree_lib.as_arrays(params)
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    if distribution is None:
        return jax.tree.unflatten(treedef, [None] * len(leaves))
    names = _names(stacked)
    tree_lib.check_names(names, paths, 'stacked')
    with_stacked = {'stacked': names} if names else {}
    known = arguments.known_arguments(distribution, with_stacked)
    if known != with_stacked:
        raise ValueError(
            'stacked layers change what a distribution selects, and this sparsity_distribution_fn takes no '
            'argument `stacked`; pass functools.partial(uniform, sparsity=…), or a function of params and stacked'
        )
    dense = [
        path for path, sparsity_type in zip(paths, types, strict=True) if sparsity_type is None
    ]
    with vector_warnings.no_warnings_about(dense):
        targets = tree_lib.leaves_like(treedef, distribution(params, **known))
    rows = zip(targets, types, paths, leaves, are_stacked(stacked, paths), strict=True)
    for i, (target, kind, path, leaf, in_layers) in enumerate(rows):
        if kind is None or not jnp.issubdtype(
            leaf.dtype, jnp.number
        ):  # flags and random keys cannot be ranked
            targets[i] = None
        elif target is not None:
            sparsity_distributions.check_sparsity(
                target, f'the sparsity of {tree_lib.path_string(path)}'
            )
            check(kind, path, leaf.shape[in_layers:])
    if types_decide:
        is_given = not isinstance(distribution, sparsity_distributions.NotGiven)
        targets = _with_shares_of_n_by_m(targets, types, paths, is_given)
    return jax.tree.unflatten(treedef, targets)


def _with_shares_of_n_by_m(
    targets: Sequence[Any],
    types: Sequence[SparsityType | None],
    paths: Sequence[tree_lib.Path],
    is_given: bool,
) -> list[Any]:
    """The targets, with its share for each leaf of N:M; whether sparsities were given says what 0 means."""
    reached, contradictions = list(targets), []
    for i, (target, leaf_type) in enumerate(zip(targets, types, strict=True)):
        if target is None or not isinstance(leaf_type, NByM):
            continue
        share = (leaf_type.m - leaf_type.n) / leaf_type.m
        if tree_lib.is_traced(target):
            reached[i] = jnp.where(target == 0, 0.0, share)
        elif float(target) != 0 or not is_given:
            reached[i] = share
            if is_given and abs(float(target) - share) > _ROUNDING:
                contradictions.append(i)
    if contradictions:
        _warn_about_contradictions(contradictions, targets, types, paths)
    return reached


def _warn_about_contradictions(
    which: Sequence[int],
    targets: Sequence[Any],
    types: Sequence[SparsityType | None],
    paths: Sequence[tree_lib.Path],
) -> None:
    leaf_type, given = types[which[0]], float(targets[which[0]])
    assert isinstance(leaf_type, NByM)
    n, m = leaf_type.n, leaf_type.m
    others = f' (and {len(which) - 1} more leaves)' if len(which) > 1 else ''
    caller_warnings.warn(
        f'{tree_lib.path_string(paths[which[0]])}{others}: sparsity {given:.4g} contradicts the sparsity type {n}:{m}, '
        f'which removes {(m - n) / m:.4g}; the share of {n}:{m} holds. Leave the sparsity out, give '
        f'{(m - n) / m:.4g}, or choose another type; print(pruner.plan(params)) shows each leaf'
    )


def _names(stacked: Stacked) -> tuple[str | tree_lib.Path, ...]:
    return (stacked,) if isinstance(stacked, str) else tuple(stacked)
