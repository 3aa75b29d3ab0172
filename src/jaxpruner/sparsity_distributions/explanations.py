"""Why a distribution leaves a leaf dense."""

from collections.abc import Callable
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.core.dtypes import holds_weights
from jaxpruner.sparsity_distributions.checks import check_custom_map
from jaxpruner.sparsity_distributions.distributions import erk, uniform
from jaxpruner.sparsity_distributions.filters import NOT_DIM_ONE_FILTER


def why_dense(
    distribution: Callable[..., tree_lib.PyTree] | None,
    params: tree_lib.PyTree,
    stacked: tree_lib.Stacked = (),
) -> list[str]:
    """For each leaf the reason for which a distribution leaves it dense, if it does.

    Args:
      distribution: any, `None` for none.
      params: the parameters, or their shapes.
      stacked: names of leaves that are stacks of layers.

    >>> import functools, jax
    >>> why_dense(functools.partial(uniform, sparsity=0.5), {'b': jax.ShapeDtypeStruct((4,), 'float32')})
    ['the default filter leaves out 1-D leaves']
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    if distribution is None:
        return ['sparsity_distribution_fn is None'] * len(leaves)
    if getattr(distribution, 'func', None) not in (uniform, erk):
        name = _name_of(distribution, 'sparsity_distribution_fn')
        return [f'{name} gives it no target'] * len(leaves)
    settings = getattr(distribution, 'keywords', {})
    rules = tree_lib.first_matches(
        check_custom_map(settings.get('custom_sparsity_map')), paths, 'custom_sparsity_map'
    )
    filter_fn = settings.get('filter_fn', NOT_DIM_ONE_FILTER)
    reasons = []
    for i, path in enumerate(paths):
        if rules[i] is not None:
            reasons.append('custom_sparsity_map says None')
        elif not holds_weights(leaves[i]):
            reasons.append(f'{leaves[i].dtype} is pruned only where custom_sparsity_map names it')
        elif filter_fn is NOT_DIM_ONE_FILTER:
            axis = tree_lib.layer_axis(stacked, path, leaves[i].shape)
            rank = len(tree_lib.layer_shape(leaves[i].shape, axis))
            reasons.append(f'the default filter leaves out {rank}-D leaves')
        else:
            reasons.append(f'{_name_of(filter_fn, "filter_fn")} leaves it out')
    return reasons


def _name_of(function: Any, otherwise: str) -> str:
    name = getattr(function, '__name__', '<lambda>')
    return otherwise if name == '<lambda>' else name
