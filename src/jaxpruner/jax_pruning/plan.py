"""What an entry of a strategy means for given parameters, carried out by the core's magnitude pruners."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxpruner import algorithms, sparsity_types
from jaxpruner.core import caller_warnings, masking
from jaxpruner.core import tree as tree_lib
from jaxpruner.jax_pruning import kernels
from jaxpruner.jax_pruning.strategy import PruningEntry, PruningStrategy, Rate, check_axis
from jaxpruner.sparsity_types import NByM, SparsityType


@dataclasses.dataclass(frozen=True)
class EntryPlan:
    """An entry with its names resolved; hashable, so that masks of equal plans are compiled once.

    Attributes:
      where: how messages call the entry.
      is_global: one ranking over all chosen leaves.
      types: the sparsity type of each leaf, `None` where the entry leaves it as it is.
      stacked: the paths of leaves whose first axis counts layers, which are ranked one by one.

    >>> EntryPlan('prune_strategy[1]', False, (sparsity_types.Unstructured(), None)).types[1] is None
    True
    """

    where: str = dataclasses.field(compare=False)
    is_global: bool
    types: tuple[SparsityType | None, ...]
    stacked: tuple[tree_lib.Path, ...] = ()

    def new_masks(
        self, params: tree_lib.PyTree, old_masks: tree_lib.PyTree, sparsities: Sequence[Any]
    ) -> tree_lib.PyTree:
        """The masks after the entry: new ones of the leaves that it means, the old ones of all others.

        Args:
          params: the parameters; what is pruned by the old masks counts as zero.
          old_masks: a tree like them, packed or not, `None` where dense; or `None`.
          sparsities: one scalar for each leaf, `None` where the entry leaves it as it is.

        Returns:
          A tree of unpacked masks, `None` where dense.
        """
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        old = (
            treedef.unflatten([None] * len(leaves))
            if old_masks is None
            else masking.unpack_masks(old_masks, params)
        )
        kept = zip(jax.tree.leaves(masking.apply_mask(params, old)), self.types, strict=True)
        scores = treedef.unflatten(
            [None if kind is None else algorithms.pruners.magnitudes(leaf) for leaf, kind in kept]
        )
        types = dict(zip(paths, self.types, strict=True))
        new = self._updater(types).create_masks(scores, treedef.unflatten(list(sparsities)))
        return tree_lib.map_with_missing(
            lambda _, mine, before: before if mine is None else mine, params, new, old
        )

    def _updater(self, types: dict[tree_lib.Path, SparsityType | None]) -> Any:
        if self.is_global:
            return algorithms.GlobalMagnitudePruning(normalize_scores=False)
        return algorithms.MagnitudePruning(
            sparsity_type=lambda path, leaf: types.get(path), stacked=self.stacked
        )


def plan_entries(
    strategy: PruningStrategy,
    params: tree_lib.PyTree,
    prune_axis: int | None = None,
    stacked: str | Sequence[str | tree_lib.Path] = (),
) -> dict[int, tuple[EntryPlan, tuple[float | None, ...]]]:
    """Resolves and checks every entry against the parameters before anything is computed.

    Args:
      strategy: the strategy.
      params: the parameters, or their shapes.
      prune_axis: the axis of N:M groups for entries that give none.
      stacked: names or globs of leaves whose first axis counts layers.

    Returns:
      For each epoch its plan, and the sparsity of each leaf (`None` where the entry leaves it as it is).

    Raises:
      ValueError: a name that matches nothing, no kernel, or a shape that does not fit; the message names the entry.
      TypeError: a parameter that is no array.

    >>> import jax.numpy as jnp
    >>> strategy = PruningStrategy.parse({1: {'method': 'unstr_global', 'prune_rate_pattern': 0.75}})
    >>> plan_entries(strategy, {'bias': jnp.ones(2), 'kernel': jnp.ones((2, 2))})[1][1]
    (None, 0.25)
    """
    check_axis(prune_axis, 'prune_axis')
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
            raise TypeError(
                f'{kernels.SEPARATOR.join(path)} holds {leaf!r}, no array; pass parameters alone, such as state.params '
                'or eqx.filter(model, eqx.is_array)'
            )
    names = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    tree_lib.check_names(names, paths, 'stacked', kernels.names_leaf, kernels.SEPARATOR)
    layered = {path for path in paths if any(kernels.names_leaf(name, path) for name in names)}
    layers = [
        _one_layer(leaf) if path in layered else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return {
        entry.epoch: _plan(entry, paths, layers, prune_axis, layered) for entry in strategy.entries
    }


def _one_layer(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def warn_about_partial_groups(plan: EntryPlan, params: tree_lib.PyTree) -> None:
    """Says which leaves end in a group of fewer than M weights.

    Args:
      plan: of an entry.
      params: the parameters, or their shapes.

    >>> import numpy as np
    >>> warn_about_partial_groups(EntryPlan('prune_strategy[1]', False, (None,)), {'w': np.ones((2, 2))})
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    leaves = [
        _one_layer(leaf) if path in plan.stacked else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    for path, leaf, leaf_type in zip(paths, leaves, plan.types, strict=True):
        if isinstance(leaf_type, NByM) and (
            rest := leaf_type.partial_group(leaf.shape, tree_lib.path_string(path))
        ):
            caller_warnings.warn(
                f'{plan.where}: {kernels.SEPARATOR.join(path)} has length {leaf.shape[leaf_type.axis]} along axis '
                f'{leaf_type.axis}, which m={leaf_type.m} does not divide: its last group keeps '
                f'{min(leaf_type.n, rest)} of {rest}'
            )


def _plan(
    entry: PruningEntry,
    paths: list[tree_lib.Path],
    leaves: list[Any],
    prune_axis: int | None,
    stacked: set[tree_lib.Path],
) -> tuple[EntryPlan, tuple[float | None, ...]]:
    rates = _leaf_rates(entry, paths, leaves)
    if entry.prune_axis is None and prune_axis is not None:
        rates = [
            dataclasses.replace(rate, axis=prune_axis)
            if isinstance(rate, NByM) and rate.axis == -1
            else rate
            for rate in rates
        ]
    types: list[SparsityType | None] = []
    for path, leaf, rate in zip(paths, leaves, rates, strict=True):
        where = f'{entry.where}: {kernels.SEPARATOR.join(path)}'
        if rate is not None and not kernels.is_prunable(leaf):
            raise ValueError(f'{where} holds {leaf.dtype}, no floats; name only leaves that do')
        types.append(
            rate
            if isinstance(rate, NByM)
            else None
            if rate is None
            else sparsity_types.Unstructured()
        )
        if isinstance(rate, NByM):
            rate.check_shape(leaf.shape, where)
    layered = () if entry.is_global else tuple(path for path in paths if path in stacked)
    return EntryPlan(entry.where, entry.is_global, tuple(types), layered), tuple(
        map(_sparsity, rates)
    )


def _sparsity(rate: Rate | None) -> float | None:
    """The share removed."""
    if rate is None:
        return None
    return 1 - rate.n / rate.m if isinstance(rate, NByM) else 1 - rate


def _leaf_rates(
    entry: PruningEntry, paths: list[tree_lib.Path], leaves: list[Any]
) -> list[Rate | None]:
    if isinstance(entry.rates, tuple):
        names = [name for name, _ in entry.rates]
        chosen = tree_lib.first_matches(
            names, paths, entry.where, kernels.names_leaf, kernels.SEPARATOR
        )
        return [None if rule is None else entry.rates[rule][1] for rule in chosen]
    found = [kernels.is_kernel(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if not any(found):
        names = ', '.join(repr(kernels.SEPARATOR.join(path)) for path in paths[:6])
        raise ValueError(
            f'{entry.where}: none of the parameters is known as a kernel ({names}{", …" if len(paths) > 6 else ""}); '
            f"name those to prune: method='{entry.method.partition('_')[0]}_local', prune_rate_pattern={{name: …}}"
        )
    return [entry.rates if is_kernel else None for is_kernel in found]
