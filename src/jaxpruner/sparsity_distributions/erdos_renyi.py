"""The Erdős–Rényi rule: the smaller a layer, the larger the share of its weights that is kept.

A layer's raw share is `(sum(shape) / prod(shape)) ** power`. All shares are scaled by one factor, so that the layers
together keep what they are to keep. A layer whose share would exceed 1 is kept whole, and the others are scaled anew.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def scaled_densities(raw: Sequence[float], sizes: Sequence[float], budget: float) -> list[float]:
    """Scales raw shares so that all layers together keep `budget` weights, or operations.

    >>> scaled_densities([0.25, 1.0], [8, 2], 6)
    [0.5, 1.0]
    """
    densities = [1.0] * len(raw)
    free = list(range(len(raw)))  # layers that are not kept whole
    while True:
        unscaled = sum(raw[i] * sizes[i] for i in free)
        if not unscaled:
            return densities
        are_free = set(free)
        kept_whole = sum(size for i, size in enumerate(sizes) if i not in are_free)
        scale = (budget - kept_whole) / unscaled
        largest = max(raw[i] for i in free)
        if scale * largest <= 1:
            break
        free = [i for i in free if raw[i] != largest]
    for i in free:
        densities[i] = scale * raw[i]
    return densities


def raw_density(shape: Sequence[int]) -> float:
    """The share of a layer before scaling, for an exponent of 1."""
    return sum(shape) / max(math.prod(shape), 1)


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
    if not 0 <= default_sparsity <= 1:
        raise ValueError(
            f'default_sparsity must lie in [0, 1] (the share of weights removed), got {default_sparsity}'
        )
    custom = custom_sparsity_map or {}
    raw: dict[Any, float] = {}
    sizes: dict[Any, int] = {}
    budget = 0
    for name, shape in var_shape_dict.items():
        if name not in custom:
            raw[name] = _raw_density_of(name, shape, include_kernel, erk_power_scale)
            sizes[name] = math.prod(shape)
            budget += sizes[name] - get_n_zeros(sizes[name], default_sparsity)
    densities = scaled_densities(list(raw.values()), list(sizes.values()), budget)
    sparsities = {name: 1 - density for name, density in zip(raw, densities, strict=True)}
    return {name: custom[name] if name in custom else sparsities[name] for name in var_shape_dict}


def _raw_density_of(
    name: Hashable, shape: Sequence[int], include_kernel: bool, power: float
) -> float:
    if include_kernel:
        return raw_density(shape) ** power
    if len(shape) < 2:
        raise ValueError(
            f'{name}: without the kernel a shape needs two axes, got {tuple(shape)}; set include_kernel'
        )
    return raw_density(tuple(shape)[-2:])
