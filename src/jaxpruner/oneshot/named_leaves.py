"""Leaves that a setting names: these are pruned whatever the model does with them, tied embeddings, too."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpruner import sparsity_distributions
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater

_ALL = '*'  # names nothing in particular


def sparsities_by_name(
    params: tree_lib.PyTree,
    sparsities: Mapping[Any, float | None],
    filter_fn: Callable[[tree_lib.Path, Any], bool] = sparsity_distributions.NOT_DIM_ONE_FILTER,
    stacked: tree_lib.Stacked = (),
) -> tree_lib.PyTree:
    """Makes a distribution that gives each leaf the sparsity of the first name that matches it, `None` for dense.

    Leaves that no name matches stay dense. Of those that a glob matches `filter_fn` selects some (it sees one layer of
    a stacked leaf), of floats alone; a leaf that is named in full is pruned whatever its shape and dtype.

    Raises:
      ValueError: a sparsity outside [0, 1], or a name that matches no leaf.

    >>> import jax.numpy as jnp
    >>> params = {'a': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}, 'b': {'kernel': jnp.ones((2, 2))}}
    >>> sparsities_by_name(params, {'a/*': 0.5})
    {'a': {'bias': None, 'kernel': 0.5}, 'b': {'kernel': None}}
    """
    for name, value in sparsities.items():
        if value is not None:
            sparsity_distributions.check_sparsity(value, f'sparsity[{name!r}]')
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    names = [name for name in sparsities if name != _ALL]
    tree_lib.check_names(names, paths, 'sparsity')

    def target(path: tree_lib.Path, leaf: Any) -> float | None:
        axis = tree_lib.layer_axis(stacked, path, leaf.shape)
        layer = jax.ShapeDtypeStruct(tree_lib.layer_shape(leaf.shape, axis), leaf.dtype)
        is_full_name = path in sparsities or tree_lib.path_string(path) in sparsities
        if is_full_name or (tree_lib.holds_weights(layer) and filter_fn(path, layer)):
            for name, sparsity in sparsities.items():
                if tree_lib.matches(name, path):
                    return sparsity
        return None

    return tree_lib.unflatten(treedef, map(target, paths, leaves), leaves)


def names_of(pruner: BaseUpdater) -> Callable[[tree_lib.Path], bool]:
    """Whether a setting of a pruner names a leaf: its custom sparsities, its types, or a distribution of one's own.

    >>> import jaxpruner
    >>> pruner = jaxpruner.create_updater_from_config(
    ...     {'algorithm': 'magnitude', 'sparsity': 0.5, 'custom_sparsity_map': {'tokens': 0.5}}
    ... )
    >>> is_named = names_of(pruner)
    >>> is_named(('tokens',)), is_named(('head',))
    (True, False)
    """
    distribution = pruner.sparsity_distribution_fn
    function = distribution.func if isinstance(distribution, functools.partial) else distribution
    if function not in _OUR_DISTRIBUTIONS:
        return lambda path: True
    keywords = getattr(distribution, 'keywords', {})
    rules = [
        sparsity_distributions.check_custom_map(keywords.get('custom_sparsity_map')),
        keywords.get('sparsities', {}),
        pruner.sparsity_type if isinstance(pruner.sparsity_type, Mapping) else {},
    ]
    return lambda path: any(_prunes_by_name(mapping, path) for mapping in rules)


_OUR_DISTRIBUTIONS = (
    sparsity_distributions.uniform,
    sparsity_distributions.erk,
    sparsities_by_name,
    None,
)


def _prunes_by_name(rules: Mapping[Any, Any], path: tree_lib.Path) -> bool:
    """Whether the first rule that matches a leaf names it, and prunes it."""
    for name, value in rules.items():
        if tree_lib.matches(name, path):
            return name != _ALL and value is not None
    return False
