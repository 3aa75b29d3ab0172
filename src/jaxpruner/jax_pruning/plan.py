"""What an entry of a strategy means for given parameters, carried out by the core's magnitude pruners."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxpruner import algorithms
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.jax_pruning import kernels
from jaxpruner.jax_pruning.strategy import PruningEntry, PruningStrategy, Rate, check_axis
from jaxpruner.sparsity_types import NByM, SparsityType, Unstructured


@dataclasses.dataclass(frozen=True)
class EntryPlan:
    """What an entry does, but for its sparsities. Hashable: masks of equal plans are compiled once."""

    is_global: bool  # one ranking over all leaves that the entry means
    types: tuple[tuple[tree_lib.Path, SparsityType], ...]  # of the leaves that the entry means
    # The axis that counts layers, which are ranked one by one.
    stacked: tuple[tuple[tree_lib.Path, int], ...]

    def new_masks(
        self,
        params: tree_lib.PyTree,
        old_masks: tree_lib.PyTree | None,
        sparsities: Mapping[tree_lib.Path, Any],
    ) -> tree_lib.PyTree:
        """New masks for the leaves that the entry means, and the old ones for all others.

        `old_masks` may be packed. The weights that they prune count as zero.
        """
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        old = tree_lib.unflatten(treedef, [None] * len(paths), leaves)
        if old_masks is not None:
            old = sparse_state_lib.unpack_masks(old_masks, params)
        types = dict(self.types)
        scores = []
        targets = []
        for path, weights in zip(
            paths, jax.tree.leaves(sparse_state_lib.apply_mask(params, old)), strict=True
        ):
            is_meant = path in types
            scores.append(algorithms.pruners.magnitudes(weights) if is_meant else None)
            targets.append(sparsities[path] if is_meant else None)
        if self.is_global:
            pruner = algorithms.GlobalMagnitudePruning(normalize_scores=False)
        else:
            pruner = algorithms.MagnitudePruning(
                sparsity_type=lambda path, _: types.get(path), stacked=dict(self.stacked)
            )
        new = pruner.create_masks(
            tree_lib.unflatten(treedef, scores, leaves),
            tree_lib.unflatten(treedef, targets, leaves),
        )
        return tree_lib.map_with_missing(
            lambda _, new, old: old if new is None else new, params, new, old
        )


class ResolvedEntry(NamedTuple):
    """An entry of a strategy, resolved for given parameters."""

    plan: EntryPlan
    sparsities: dict[tree_lib.Path, float]  # of the leaves that the entry means
    warnings: list[str]


def resolve_entries(
    strategy: PruningStrategy,
    params: tree_lib.PyTree,
    prune_axis: int | None = None,
    stacked: tree_lib.Stacked = (),
) -> dict[int, ResolvedEntry]:
    """Resolves and checks the entry of every epoch against the parameters, or their shapes.

    `prune_axis` is the axis of N:M groups for entries that give none.

    Raises:
      ValueError: a name that matches nothing, no kernel, or a shape that does not fit; the message names the entry.
      TypeError: a parameter that is no array.
    """
    check_axis(prune_axis, 'prune_axis')
    leaves = _read_leaves(params, stacked)
    return {entry.epoch: _resolve(entry, leaves, prune_axis) for entry in strategy.entries}


class _Leaf(NamedTuple):
    path: tree_lib.Path
    layer: Any  # its shape and dtype; those of one layer if it is stacked
    layer_axis: int | None

    @property
    def name(self) -> str:
        return kernels.SEPARATOR.join(self.path)


def _read_leaves(params: tree_lib.PyTree, stacked: tree_lib.Stacked) -> list[_Leaf]:
    paths, arrays, _ = tree_lib.flatten_with_paths(params)
    for path, array in zip(paths, arrays, strict=True):
        if not hasattr(array, 'shape') or not hasattr(array, 'dtype'):
            raise TypeError(
                f'{kernels.SEPARATOR.join(path)} holds {array!r}, no array; pass parameters alone, such as '
                'state.params or eqx.filter(model, eqx.is_array)'
            )
    names = tree_lib.as_names(stacked)
    tree_lib.check_names(names, paths, 'stacked', kernels.names_leaf, kernels.SEPARATOR)
    leaves = []
    for path, array in zip(paths, arrays, strict=True):
        axis = tree_lib.layer_axis(stacked, path, array.shape, kernels.names_leaf)
        shape = tree_lib.layer_shape(array.shape, axis)
        leaves.append(_Leaf(path, jax.ShapeDtypeStruct(shape, array.dtype), axis))
    return leaves


def _resolve(entry: PruningEntry, leaves: list[_Leaf], prune_axis: int | None) -> ResolvedEntry:
    rates = _rates_of(entry, leaves)
    types: dict[tree_lib.Path, SparsityType] = {}
    sparsities = {}
    warnings = []
    for leaf in leaves:
        if leaf.path not in rates:
            continue
        rate = rates[leaf.path]
        where = f'{entry.where}: {leaf.name}'
        if not tree_lib.holds_weights(leaf.layer):
            raise ValueError(
                f'{where} holds {leaf.layer.dtype}, no floats; name only leaves that do'
            )
        if isinstance(rate, NByM):
            if entry.prune_axis is None and prune_axis is not None and rate.axis == -1:
                rate = dataclasses.replace(rate, axis=prune_axis)
            warnings += _partial_group_warnings(rate, leaf, where)
            types[leaf.path] = rate
            sparsities[leaf.path] = 1 - rate.n / rate.m
        else:
            types[leaf.path] = Unstructured()
            sparsities[leaf.path] = 1 - rate
    stacked = []
    if not entry.is_global:
        stacked = [(leaf.path, leaf.layer_axis) for leaf in leaves if leaf.layer_axis is not None]
    plan = EntryPlan(entry.is_global, tuple(types.items()), tuple(stacked))
    return ResolvedEntry(plan, sparsities, warnings)


def _partial_group_warnings(n_by_m: NByM, leaf: _Leaf, where: str) -> list[str]:
    """A warning if a last group has fewer than M weights; raises ValueError where N:M does not fit the shape."""
    shape = leaf.layer.shape
    n_by_m.check_shape(shape, where)
    rest = n_by_m.partial_group(shape, where)
    if not rest:
        return []
    return [
        f'{where} has length {shape[n_by_m.axis]} along axis {n_by_m.axis}, which m={n_by_m.m} does not divide: '
        f'its last group keeps {min(n_by_m.n, rest)} of {rest}'
    ]


def _rates_of(entry: PruningEntry, leaves: list[_Leaf]) -> dict[tree_lib.Path, Rate]:
    """The rate of each leaf that the entry means."""
    rates = {}
    if isinstance(entry.rates, tuple):
        names = [name for name, _ in entry.rates]
        paths = [leaf.path for leaf in leaves]
        rules = tree_lib.first_matches(
            names, paths, entry.where, kernels.names_leaf, kernels.SEPARATOR
        )
        for path, rule in zip(paths, rules, strict=True):
            rate = None if rule is None else entry.rates[rule][1]
            if rate is not None:
                rates[path] = rate
        return rates
    for leaf in leaves:
        if kernels.is_kernel(leaf.path, leaf.layer):
            rates[leaf.path] = entry.rates
    if not rates:
        names = ', '.join(repr(leaf.name) for leaf in leaves[:6])
        more = ', …' if len(leaves) > 6 else ''
        raise ValueError(
            f'{entry.where}: none of the parameters is known as a kernel ({names}{more}); '
            f"name those to prune: method='{entry.method.partition('_')[0]}_local', prune_rate_pattern={{name: …}}"
        )
    return rates
