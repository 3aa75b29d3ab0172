"""The two distributions that papers use: the same sparsity for all leaves, and Erdős–Rényi-Kernel."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.core import vector_warnings
from jaxpruner.core.dtypes import holds_weights
from jaxpruner.sparsity_distributions import erdos_renyi
from jaxpruner.sparsity_distributions.checks import SparsityMap, check_custom_map, check_sparsity
from jaxpruner.sparsity_distributions.filters import NOT_DIM_ONE_FILTER, FilterFn


def uniform(
    params: tree_lib.PyTree,
    sparsity: Any,
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER,
    custom_sparsity_map: SparsityMap | None = None,
    stacked: tree_lib.Stacked = (),
) -> tree_lib.PyTree:
    """The same sparsity for every selected leaf.

    Args:
      params: any pytree of arrays (or of shapes).
      sparsity: share of weights to remove, in [0, 1].
      filter_fn: `(path, leaf) -> bool`, selects leaves of floats; default: those with more than one dimension.
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense); overrides the filter, the first match wins.
        Integers are pruned only where it names them.
      stacked: globs of leaves whose first axis counts layers, or a mapping from globs to that axis; they are filtered
        by the shape of one layer.

    Returns:
      A tree like `params` with a sparsity for each leaf, `None` where it is dense.

    Raises:
      ValueError: a sparsity outside [0, 1], or a name that matches no leaf.

    >>> import numpy as np
    >>> uniform({'bias': np.ones(4), 'kernel': np.ones((2, 4))}, 0.5)
    {'bias': None, 'kernel': 0.5}
    """
    check_sparsity(sparsity, 'sparsity')
    selection = _select(params, filter_fn, custom_sparsity_map, stacked)
    return selection.tree_of(dict.fromkeys(selection.layer_shapes, sparsity))


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
    stacked: tree_lib.Stacked = (),
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
      filter_fn: `(path, leaf) -> bool`, selects leaves of floats; default: those with more than one dimension.
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense); overrides the filter, the first match wins.
        These leaves are outside the budget. Integers are pruned only where it names them.
      stacked: globs of leaves whose first axis counts layers, or a mapping from globs to that axis; shape and filter
        are those of one layer.
      count_excluded: `sparsity` is meant of *all* parameters of floats: what leaves outside the budget keep is taken
        out of it.
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
    selection = _select(param_tree, filter_fn, custom_sparsity_map, stacked)
    if flops is not None and count_excluded:
        raise ValueError(
            'count_excluded counts weights, and flops counts operations; give one of them'
        )
    sizes: Sequence[float] = [
        math.prod(leaf.shape) if holds_weights(leaf) else 0 for leaf in selection.leaves
    ]
    if count_excluded:
        budget = _budget_of_all(selection, sizes, sparsity)
    elif flops is not None:
        sizes = _flops_of_leaves(param_tree, flops, selection.layer_shapes)
        budget = (1 - float(sparsity)) * sum(sizes[i] for i in selection.layer_shapes)
    else:
        # Whole numbers of weights, layer by layer, as the reference implementation counts them.
        budget = 0
        for i in selection.layer_shapes:
            budget += sizes[i] - erdos_renyi.get_n_zeros(int(sizes[i]), float(sparsity))
    order = sorted(selection.layer_shapes)
    raw = [erdos_renyi.raw_density(selection.layer_shapes[i]) for i in order]
    densities = erdos_renyi.scaled_densities(raw, [sizes[i] for i in order], budget)
    sparsities = {i: 1 - density for i, density in zip(order, densities, strict=True)}
    return selection.tree_of(sparsities)


def _flops_of_leaves(
    params: tree_lib.PyTree, flops: Mapping[Any, float], selected: Mapping[int, tuple[int, ...]]
) -> list[float]:
    paths = tree_lib.flatten_with_paths(params)[0]
    rules, values = tree_lib.first_matches(flops, paths, 'flops'), list(flops.values())
    for i in sorted(selected):
        if rules[i] is None:
            name = tree_lib.path_string(paths[i])
            raise ValueError(
                f'flops: nothing is said of {name}, which is to be pruned; give its operations, or leave it out of '
                f"the budget: custom_sparsity_map={{'{name}': None}}"
            )
    return [0.0 if rule is None else float(values[rule]) for rule in rules]


class _Selection(NamedTuple):
    """The leaves of a model as a distribution sees them."""

    leaves: list[Any]
    treedef: Any
    custom: dict[int, float | None]  # sparsities that are given by name, by index of the leaf
    layer_shapes: dict[int, tuple[int, ...]]  # of the leaves that the filter selects, by index

    def tree_of(self, sparsities: Mapping[int, Any]) -> tree_lib.PyTree:
        """A tree of targets, from those of the selected leaves and those that are given by name."""
        targets: list[Any] = [None] * len(self.leaves)
        for i, sparsity in {**sparsities, **self.custom}.items():
            targets[i] = sparsity
        return tree_lib.unflatten(self.treedef, targets, self.leaves)


def _budget_of_all(selection: _Selection, sizes: Sequence[float], sparsity: float) -> float:
    """What the selected leaves may keep where `sparsity` is a share of all parameters."""
    kept_outside = 0.0
    for i, size in enumerate(sizes):
        if i not in selection.layer_shapes:
            kept_outside += size * (1 - float(selection.custom.get(i) or 0))
    budget = (1 - float(sparsity)) * sum(sizes) - kept_outside
    if budget < 0:
        raise ValueError(
            f'sparsity {sparsity} of all {sum(sizes)} parameters cannot be reached: the leaves outside the budget '
            f'keep {kept_outside:.0f} weights; lower the sparsity, or select more leaves'
        )
    return budget


def _select(
    params: tree_lib.PyTree,
    filter_fn: FilterFn,
    custom_sparsity_map: SparsityMap | None,
    stacked: tree_lib.Stacked,
) -> _Selection:
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    custom_map = check_custom_map(custom_sparsity_map)
    rules = tree_lib.first_matches(custom_map, paths, 'custom_sparsity_map')
    tree_lib.check_names(tree_lib.as_names(stacked), paths, 'stacked')
    custom, layer_shapes = {}, {}
    named_sparsities = list(custom_map.values())
    for i, path in enumerate(paths):
        rule, layer = rules[i], leaves[i]
        axis = tree_lib.layer_axis(stacked, path, layer.shape)
        if axis is not None:
            layer = jax.ShapeDtypeStruct(tree_lib.layer_shape(layer.shape, axis), layer.dtype)
        if rule is not None:
            custom[i] = named_sparsities[rule]
        elif holds_weights(layer) and filter_fn(path, layer):
            layer_shapes[i] = tuple(layer.shape)
    if filter_fn is NOT_DIM_ONE_FILTER:
        vector_warnings.warn_about_vectors(paths, leaves, layer_shapes, stacked)
    return _Selection(leaves, treedef, custom, layer_shapes)
