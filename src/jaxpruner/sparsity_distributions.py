"""How a total sparsity is shared among the leaves: a distribution maps parameters to one target per leaf.

Any function `params -> tree of floats, None where dense` is a distribution; `uniform` and `erk` are the two that papers
use. Below them stand filters and checks of settings.

The Erdős–Rényi rule: a layer's raw share of kept weights is `(sum(shape) / prod(shape)) ** power`, so that small layers
keep more. All shares are scaled by one factor, so that the layers together keep what they are to keep. A layer whose
share would exceed 1 is kept whole, and the others are scaled anew.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.tree import PyTree

SparsityMap = Mapping[Any, float | None] | Sequence[tuple[Any, float | None]]
FilterFn = Callable[[tree_lib.Path, Any], bool]
FilterFnType = FilterFn  # its name in JaxPruner

# Last names of parameters that are vectors in one layer.
VECTOR_NAMES = frozenset({'bias', 'b', 'scale', 'offset', 'beta', 'gamma'})


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
    return NOT_DIM_ONE_FILTER(path, param) and path[-1] not in VECTOR_NAMES


def uniform(
    params: PyTree,
    sparsity: Any,
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER,
    custom_sparsity_map: SparsityMap | None = None,
    stacked: tree_lib.Stacked = (),
) -> PyTree:
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

    def shares(shapes, sizes):
        del sizes
        return [sparsity] * len(shapes)

    return _targets(shares, params, filter_fn, custom_sparsity_map, stacked)


class NotGiven(functools.partial):
    """A distribution that stands where nobody has given one, so that only types that say it themselves prune.

    >>> type(NOT_GIVEN).__name__, NOT_GIVEN.keywords
    ('NotGiven', {'sparsity': 0.0})
    """


# The default of all updaters: N:M prunes to its own share, everything else stays dense.
NOT_GIVEN = NotGiven(uniform, sparsity=0.0)


def is_default(distribution: Any) -> bool:
    """Whether a distribution asks for nothing: `None`, or the default, which clients of JaxPruner write out.

    >>> is_default(functools.partial(uniform, sparsity=0)), is_default(functools.partial(uniform, sparsity=0.5))
    (True, False)
    """
    if distribution is None:
        return True
    keywords = getattr(distribution, 'keywords', {})
    is_uniform = getattr(distribution, 'func', None) is uniform and list(keywords) == ['sparsity']
    return is_uniform and not tree_lib.is_traced(keywords['sparsity']) and keywords['sparsity'] == 0


def erk(
    param_tree: PyTree,
    sparsity: float,
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER,
    custom_sparsity_map: SparsityMap | None = None,
    stacked: tree_lib.Stacked = (),
) -> PyTree:
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

    Returns:
      A tree like `param_tree` with a sparsity for each leaf, `None` where it is dense.

    Raises:
      ValueError: a sparsity outside [0, 1], or a name that matches no leaf.
      TypeError: a sparsity that is being traced; which layers stay whole depends on its value.

    >>> import numpy as np
    >>> erk({'wide': np.ones((64, 64)), 'narrow': np.ones((64, 8))}, 0.5)
    {'narrow': 0.0, 'wide': 0.5625}
    """
    check_sparsity(sparsity, 'sparsity')
    if tree_lib.is_traced(sparsity):
        raise TypeError(
            'erk needs a concrete sparsity, since its value decides which layers stay dense; got a traced value'
        )

    def shares(shapes, sizes):
        return [1 - density for density in _densities(shapes, sizes, float(sparsity))]

    return _targets(shares, param_tree, filter_fn, custom_sparsity_map, stacked)


def _targets(shares, params, filter_fn, custom_sparsity_map, stacked):
    """Makes the tree of targets: `shares(shapes, sizes)` lists those of the leaves that the filter selects.

    A shape is that of one layer, a size that of the whole leaf.
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    targets = custom_sparsities(custom_sparsity_map, paths)
    axes = tree_lib.layer_axes(stacked, paths, [leaf.shape for leaf in leaves])
    shapes = {}
    for i, (path, leaf, axis) in enumerate(zip(paths, leaves, axes, strict=True)):
        shape = tree_lib.layer_shape(leaf.shape, axis)
        layer = leaf if axis is None else jax.ShapeDtypeStruct(shape, leaf.dtype)
        if i not in targets and tree_lib.holds_weights(leaf) and filter_fn(path, layer):
            shapes[i] = tuple(shape)
    sizes = [math.prod(leaves[i].shape) for i in shapes]
    targets |= zip(shapes, shares(list(shapes.values()), sizes), strict=True)
    return tree_lib.unflatten(treedef, map(targets.get, range(len(leaves))), leaves)


def _densities(shapes, sizes, sparsity, power: float = 1):
    """Scales the raw shares of layers so that all together keep `1 - sparsity` of their weights.

    >>> _densities([(8, 8), (2, 2)], [64, 4], 0.5)
    [0.46875, 1.0]
    """
    # Whole numbers of weights, layer by layer, as the reference implementation counts them.
    budget = sum(size - get_n_zeros(size, sparsity) for size in sizes)
    raw = [(sum(shape) / max(math.prod(shape), 1)) ** power for shape in shapes]
    densities = [1.0] * len(raw)
    free = list(range(len(raw)))  # layers that are not kept whole
    while unscaled := sum(raw[i] * sizes[i] for i in free):
        kept_whole = sum(sizes) - sum(sizes[i] for i in free)
        scale, largest = (budget - kept_whole) / unscaled, max(raw[i] for i in free)
        if scale * largest <= 1:
            for i in free:
                densities[i] = scale * raw[i]
            break
        free = [i for i in free if raw[i] != largest]
    return densities


def get_n_zeros(size: int, sparsity: float) -> int:
    """The number of weights that a distribution counts as removed.

    Args:
      size: the number of weights.
      sparsity: share to remove, in [0, 1].

    Returns:
      `floor(sparsity * size)`. Masks keep `max(1, round(size * (1 - sparsity)))` weights: see `mask_calculator`.

    >>> get_n_zeros(10, 0.25)
    2
    """
    return math.floor(sparsity * size)


def get_sparsities_erdos_renyi(
    var_shape_dict: Mapping[Any, Sequence[int]],
    default_sparsity: float,
    custom_sparsity_map: Mapping[Any, float] | None = None,
    include_kernel: bool = True,
    erk_power_scale: float = 1.0,
) -> dict[Any, float]:
    r"""Shares a total sparsity among named shapes; `sparsity_distributions.erk` does so for a pytree.

    The share kept in a layer of shape $d$ is proportional to $(\sum_i d_i / \prod_i d_i)^{scale}$. Without the kernel's
    spatial axes it is proportional to $(a + b) / (a b)$ of the last two axes, whatever the scale.

    Args:
      var_shape_dict: name -> shape.
      default_sparsity: sparsity of all layers together, in [0, 1].
      custom_sparsity_map: name -> sparsity of layers outside the budget; names without a shape are ignored.
      include_kernel: whether all axes count, or the last two alone.
      erk_power_scale: the exponent; 0 is uniform.

    Returns:
      Name -> sparsity.

    Raises:
      ValueError: there is no shape, the sparsity lies outside [0, 1], or the last two axes are needed and missing.

    >>> shapes = {'a': (2, 4), 'b': (3, 6), 'c': (2, 4, 6)}
    >>> {name: round(value, 2) for name, value in get_sparsities_erdos_renyi(shapes, 0.5).items()}
    {'a': 0.0, 'b': 0.31, 'c': 0.65}
    """
    if not var_shape_dict:
        raise ValueError('var_shape_dict is empty; give at least one name with its shape')
    check_sparsity(default_sparsity, 'default_sparsity')
    custom = custom_sparsity_map or {}
    shapes = {name: tuple(shape) for name, shape in var_shape_dict.items() if name not in custom}
    for name, shape in shapes.items():
        if not include_kernel and len(shape) < 2:
            raise ValueError(
                f'{name}: without the kernel a shape needs two axes, got {shape}; set include_kernel'
            )
    counted = [shape if include_kernel else shape[-2:] for shape in shapes.values()]
    sizes = [math.prod(shape) for shape in shapes.values()]
    power = erk_power_scale if include_kernel else 1
    densities = iter(_densities(counted, sizes, default_sparsity, power))
    return {
        name: custom[name] if name in custom else 1 - next(densities) for name in var_shape_dict
    }


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
    _check_share(sparsity, name, 'between 0 and 1', '[0, 1] (the share of weights removed)')


def check_density(density: Any, name: str) -> None:
    """As `check_sparsity`, of a density, the share of weights kept, which is above 0.

    >>> check_density(0.9, 'density')
    """
    _check_share(density, name, 'above 0 and at most 1', '(0, 1] (the share that is kept)')


def _check_share(share, name, range_words, interval):
    if tree_lib.is_traced(share):
        return
    if not tree_lib.is_number(share):
        raise TypeError(f'{name} must be a number {range_words}, got {share!r}')
    value = float(share)
    if not 0 <= value <= 1 or (value == 0 and interval.startswith('(')):
        hint = f'; {value} per cent is {value / 100}' if 1 < value <= 100 else ''
        raise ValueError(f'{name} must lie in {interval}, got {share!r}{hint}')


def custom_sparsities(custom_sparsity_map: Any, paths: Sequence[tree_lib.Path]) -> dict[int, Any]:
    """Finds the sparsity that a custom map gives a leaf (`None` = dense), by the index of each leaf that it names.

    Raises:
      TypeError, ValueError: as `check_custom_map`; also a name that matches no leaf.

    >>> custom_sparsities({'head/*': 0.5}, [('a', 'kernel'), ('head', 'kernel')])
    {1: 0.5}
    """
    custom_map = check_custom_map(custom_sparsity_map)
    return tree_lib.values_by_leaf(custom_map, paths, 'custom_sparsity_map')


def check_custom_map(
    custom_sparsity_map: SparsityMap | None, setting: str = 'custom_sparsity_map'
) -> dict[Any, float | None]:
    """Checks the values of a custom sparsity map.

    Args:
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense), as a mapping or a list of pairs.
      setting: what the setting is called, for the messages.

    Returns:
      The map as a dict, empty for `None`.

    Raises:
      TypeError: it is no map, or something in it is no name or number.
      ValueError: a sparsity outside [0, 1].

    >>> check_custom_map([('head/*', None)])
    {'head/*': None}
    """
    rules = () if custom_sparsity_map is None else custom_sparsity_map
    custom_map = tree_lib.read_rules(rules, setting)
    for name, value in custom_map.items():
        if value is not None:
            check_sparsity(value, f'{setting}[{name!r}]')
    return custom_map


def filter_of(distribution: Any) -> FilterFn | None:
    """Finds the filter of `uniform` or `erk` with settings; `None` for any other distribution.

    >>> filter_of(functools.partial(uniform, sparsity=0.5)) is NOT_DIM_ONE_FILTER
    True
    """
    if getattr(distribution, 'func', None) not in (uniform, erk):
        return None
    return distribution.keywords.get('filter_fn', NOT_DIM_ONE_FILTER)
