"""Checks of the settings of distributions, before anything is computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner import tree as tree_lib

SparsityMap = Mapping[Any, float | None] | Sequence[tuple[Any, float | None]]


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
