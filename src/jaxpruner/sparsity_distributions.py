"""How a total sparsity is shared among the leaves: a distribution maps parameters to one target per leaf.

Any function `params -> tree of floats, None where dense` is a distribution; these are the two that papers use.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpruner.core import erdos_renyi, vector_warnings
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.erdos_renyi import get_n_zeros as get_n_zeros
from jaxpruner.core.erdos_renyi import get_sparsities_erdos_renyi as get_sparsities_erdos_renyi

FilterFn = Callable[[tree_lib.Path, Any], bool]
FilterFnType = FilterFn  # its name in JaxPruner
SparsityMap = Mapping[Any, float | None] | Sequence[tuple[Any, float | None]]


def NOT_DIM_ONE_FILTER(key: tree_lib.Path, param: Any) -> bool:
    """Selects the leaves with more than one dimension: kernels, not biases and norms.

    Args:
      key: the leaf's path.
      param: the leaf.

    >>> import numpy as np
    >>> NOT_DIM_ONE_FILTER(('dense', 'bias'), np.ones(3))
    False
    """
    del key
    return getattr(param, 'ndim', 0) > 1  # a number of Python has none


NOT_DIM_ONE_FILTER_FN = NOT_DIM_ONE_FILTER  # its name in JaxPruner


def KERNEL_FILTER_FN(key: tree_lib.Path, param: Any) -> bool:
    """Selects the leaves whose last name is `kernel`.

    Args:
      key: the leaf's path.
      param: the leaf.

    >>> KERNEL_FILTER_FN(('dense', 'kernel'), None)
    True
    """
    del param
    return key[-1] == 'kernel'


def NOT_BIAS_FILTER(path: tree_lib.Path, param: Any) -> bool:
    """Selects the leaves with more than one dimension whose name is not that of a bias or norm.

    The biases of attention layers have two dimensions in some libraries, heads and their width.

    >>> import numpy as np
    >>> NOT_BIAS_FILTER(('query', 'bias'), np.ones((8, 64))), NOT_BIAS_FILTER(('query', 'kernel'), np.ones((8, 64)))
    (False, True)
    """
    return NOT_DIM_ONE_FILTER(path, param) and path[-1] not in vector_warnings.VECTOR_NAMES


def check_sparsity(sparsity: Any, name: str) -> None:
    """Refuses a sparsity outside [0, 1]; values that are being traced cannot be checked and pass.

    Args:
      sparsity: a number or a scalar array.
      name: what it is called, for the message.

    Raises:
      ValueError: it is NaN or outside [0, 1].
      TypeError: it is no number.

    >>> check_sparsity(0.9, 'sparsity')
    """
    _check_share(
        sparsity,
        name,
        'between 0 and 1',
        '[0, 1] (the share of weights removed)',
        lambda value: 0 <= value <= 1,
    )


def check_density(density: Any, name: str) -> None:
    """Refuses a density, the share of weights kept, outside (0, 1]; traced values pass.

    Args:
      density: a number or a scalar array.
      name: what it is called, for the message.

    Raises:
      ValueError: it is NaN or outside (0, 1].
      TypeError: it is no number.

    >>> check_density(0.9, 'density')
    """
    _check_share(
        density,
        name,
        'above 0 and at most 1',
        '(0, 1] (the share that is kept)',
        lambda value: 0 < value <= 1,
    )


def _check_share(
    share: Any, name: str, range_words: str, interval: str, is_inside: Callable[[float], bool]
) -> None:
    if tree_lib.is_traced(share):
        return
    if not tree_lib.is_number(share):
        raise TypeError(f'{name} must be a number {range_words}, got {share!r}')
    value = float(share)
    if not is_inside(value):
        hint = f'; {value} per cent is {value / 100}' if 1 < value <= 100 else ''
        raise ValueError(f'{name} must lie in {interval}, got {share!r}{hint}')


def check_custom_map(custom_sparsity_map: SparsityMap | None) -> dict[Any, float | None]:
    """Checks the values of a custom sparsity map.

    Args:
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense), as a mapping or a list of pairs.

    Returns:
      The map as a dict, empty for `None`.

    Raises:
      TypeError: it is no map, or something in it is no name or number.
      ValueError: a sparsity outside [0, 1].

    >>> check_custom_map([('head/*', None)])
    {'head/*': None}
    """
    custom_map = {} if custom_sparsity_map is None else _dict_of(custom_sparsity_map)
    for name, value in custom_map.items():
        if value is not None:
            check_sparsity(value, f'custom_sparsity_map[{name!r}]')
    return custom_map


def _dict_of(custom_sparsity_map: Any) -> dict[Any, Any]:
    pairs = custom_sparsity_map
    if hasattr(pairs, 'keys'):  # a ConfigDict is no Mapping, but has its methods
        pairs = [(name, custom_sparsity_map[name]) for name in custom_sparsity_map]
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise TypeError(
            "custom_sparsity_map must be a mapping such as {'head/*': None, 'a/kernel': 0.5}, or a list of such pairs, "
            f'got {custom_sparsity_map!r}'
        )
    return {tree_lib.rule_name(name, 'custom_sparsity_map: '): value for name, value in pairs}


def uniform(
    params: tree_lib.PyTree,
    sparsity: Any,
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER,
    custom_sparsity_map: SparsityMap | None = None,
    stacked: Sequence[str] = (),
) -> tree_lib.PyTree:
    """The same sparsity for every selected leaf.

    Args:
      params: any pytree of arrays (or of shapes).
      sparsity: share of weights to remove, in [0, 1].
      filter_fn: `(path, leaf) -> bool`, selects leaves; default: those with more than one dimension.
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense); overrides the filter, the first match wins.
      stacked: globs of leaves whose first axis counts layers; they are filtered by the shape of one layer.

    Returns:
      A tree like `params` with a sparsity for each leaf, `None` where it is dense.

    Raises:
      ValueError: a sparsity outside [0, 1], or a name that matches no leaf.

    >>> import numpy as np
    >>> uniform({'bias': np.ones(4), 'kernel': np.ones((2, 4))}, 0.5)
    {'bias': None, 'kernel': 0.5}
    """
    check_sparsity(sparsity, 'sparsity')
    _, treedef, custom, selected = _select(params, filter_fn, custom_sparsity_map, stacked)
    targets = [
        custom.get(i, sparsity if i in selected else None) for i in range(treedef.num_leaves)
    ]
    return jax.tree.unflatten(treedef, targets)


class NotGiven(functools.partial):
    """A distribution that stands where nobody has given one, so that only types that say it themselves prune.

    >>> type(NOT_GIVEN).__name__, NOT_GIVEN.keywords
    ('NotGiven', {'sparsity': 0.0})
    """


# The default of all updaters: N:M prunes to its own share, everything else stays dense.
NOT_GIVEN = NotGiven(uniform, sparsity=0.0)


def erk(
    param_tree: tree_lib.PyTree,
    sparsity: float,
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER,
    custom_sparsity_map: SparsityMap | None = None,
    stacked: Sequence[str] = (),
    count_excluded: bool = False,
    flops: Mapping[Any, float] | None = None,
) -> tree_lib.PyTree:
    r"""Erdős–Rényi-Kernel: small layers stay denser, the total is `sparsity`.

    The share kept in a layer of shape $d$ is proportional to $\sum_i d_i / \prod_i d_i$, scaled so that all selected
    layers together keep `1 - sparsity` of their weights; layers whose share would exceed 1 are left whole. From Evci et
    al., "Rigging the Lottery", 2020.

    Args:
      param_tree: any pytree of arrays (or of shapes).
      sparsity: share of weights to remove, in [0, 1].
      filter_fn: `(path, leaf) -> bool`, selects leaves; default: those with more than one dimension.
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense); overrides the filter, the first match wins.
        These leaves are outside the budget.
      stacked: globs of leaves whose first axis counts layers; shape and filter are those of one layer.
      count_excluded: `sparsity` is meant of *all* parameters: what leaves outside the budget keep is taken out of it.
      flops: leaf name or glob -> floating point operations (`UseGraph.leaf_flops`): `sparsity` is meant of these, not
        of weights.

    Returns:
      A tree like `param_tree` with a sparsity for each leaf, `None` where it is dense.

    Raises:
      ValueError: a sparsity outside [0, 1], a name that matches no leaf, a selected leaf without `flops`, or excluded
        leaves that exceed the budget.
      TypeError: a sparsity that is being traced; which layers stay whole depends on its value.

    >>> import numpy as np
    >>> erk({'wide': np.ones((64, 64)), 'narrow': np.ones((64, 8))}, 0.5)
    {'narrow': 0.0, 'wide': 0.5625}
    >>> erk({'wide': np.ones((64, 64)), 'narrow': np.ones((64, 8))}, 0.5, flops={'wide': 800.0, 'narrow': 400.0})
    {'narrow': 0.0, 'wide': 0.75}
    """
    check_sparsity(sparsity, 'sparsity')
    if tree_lib.is_traced(sparsity):
        raise TypeError(
            'erk needs a concrete sparsity, since its value decides which layers stay dense; got a traced value'
        )
    leaves, treedef, custom, selected = _select(param_tree, filter_fn, custom_sparsity_map, stacked)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    # Whole numbers of weights, layer by layer, as the reference implementation counts them.
    budget = sum(sizes[i] - math.floor(float(sparsity) * sizes[i]) for i in selected)
    if count_excluded:
        excluded = [i for i in range(len(leaves)) if i not in selected]
        kept_outside = sum(sizes[i] * (1 - float(custom.get(i) or 0)) for i in excluded)
        budget = (1 - float(sparsity)) * sum(sizes) - kept_outside
        if budget < 0:
            raise ValueError(
                f'sparsity {sparsity} of all {sum(sizes)} parameters cannot be reached: the leaves outside the budget '
                f'keep {kept_outside:.0f} weights; lower the sparsity, or select more leaves'
            )
    weights: Sequence[float] = sizes
    if flops is not None:
        if count_excluded:
            raise ValueError(
                'count_excluded counts weights, and flops counts operations; give one of them'
            )
        weights = _flops_of_leaves(param_tree, flops, selected)
        budget = (1 - float(sparsity)) * sum(weights[i] for i in selected)
    ordered = sorted(selected)
    raw = [erdos_renyi.raw_density(selected[i]) for i in ordered]
    densities = erdos_renyi.scaled_densities(raw, [weights[i] for i in ordered], budget)
    by_leaf = dict(zip(ordered, densities, strict=True))
    targets = [
        custom[i] if i in custom else 1 - by_leaf[i] if i in by_leaf else None
        for i in range(len(leaves))
    ]
    return jax.tree.unflatten(treedef, targets)


def why_dense(
    distribution: Callable[..., tree_lib.PyTree] | None,
    params: tree_lib.PyTree,
    stacked: str | Sequence[Any] = (),
) -> list[str]:
    """For each leaf the reason for which a distribution leaves it dense, if it does.

    Args:
      distribution: any, `None` for none.
      params: the parameters, or their shapes.
      stacked: names of leaves that are stacks of layers.

    >>> why_dense(functools.partial(uniform, sparsity=0.5), {'b': jax.ShapeDtypeStruct((4,), 'float32')})
    ['the default filter leaves out 1-D leaves']
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    if distribution is None:
        return ['sparsity_distribution_fn is None'] * len(leaves)
    if getattr(distribution, 'func', None) not in (uniform, erk):
        return [f'{_name_of(distribution, "sparsity_distribution_fn")} gives it no target'] * len(
            leaves
        )
    settings = getattr(distribution, 'keywords', {})
    rules = tree_lib.first_matches(
        check_custom_map(settings.get('custom_sparsity_map')), paths, 'custom_sparsity_map'
    )
    filter_fn = settings.get('filter_fn', NOT_DIM_ONE_FILTER)
    names = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    reasons = []
    for path, leaf, rule in zip(paths, leaves, rules, strict=True):
        is_stacked = any(tree_lib.matches(name, path) for name in names)
        if rule is not None:
            reasons.append('custom_sparsity_map says None')
        elif filter_fn is NOT_DIM_ONE_FILTER:
            reasons.append(f'the default filter leaves out {leaf.ndim - is_stacked}-D leaves')
        else:
            reasons.append(f'{_name_of(filter_fn, "filter_fn")} leaves it out')
    return reasons


def _name_of(function: Any, otherwise: str) -> str:
    name = getattr(function, '__name__', '<lambda>')
    return otherwise if name == '<lambda>' else name


def _flops_of_leaves(
    params: tree_lib.PyTree, flops: Mapping[Any, float], selected: Mapping[int, tuple[int, ...]]
) -> list[float]:
    paths = tree_lib.flatten_with_paths(params)[0]
    rules, values = tree_lib.first_matches(flops, paths, 'flops'), list(flops.values())
    for i in sorted(selected):
        if rules[i] is None:
            name = tree_lib.path_string(paths[i])
            raise ValueError(
                f'flops: nothing is said of {name}, which is to be pruned; give its operations, or leave it out of the '
                f"budget: custom_sparsity_map={{'{name}': None}}"
            )
    return [0.0 if rule is None else float(values[rule]) for rule in rules]


def _select(
    params: tree_lib.PyTree,
    filter_fn: FilterFn,
    custom_sparsity_map: SparsityMap | None,
    stacked: Sequence[str],
) -> tuple[list[Any], Any, dict[int, float | None], dict[int, tuple[int, ...]]]:
    """Leaves, structure, custom sparsities by leaf index, and layer shapes of the filtered leaves by leaf index."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    custom_map = check_custom_map(custom_sparsity_map)
    stacked = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    rules = tree_lib.first_matches(custom_map, paths, 'custom_sparsity_map')
    tree_lib.check_names(stacked, paths, 'stacked')
    custom, selected = {}, {}
    values = list(custom_map.values())
    for i, (path, leaf, rule) in enumerate(zip(paths, leaves, rules, strict=True)):
        is_stacked = any(tree_lib.matches(name, path) for name in stacked)
        layer = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if is_stacked else leaf
        if rule is not None:
            custom[i] = values[rule]
        elif filter_fn(path, layer):
            selected[i] = tuple(layer.shape)
    if filter_fn is NOT_DIM_ONE_FILTER:
        vector_warnings.warn_about_vectors(paths, leaves, selected, stacked)
    return leaves, treedef, custom, selected
