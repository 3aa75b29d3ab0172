"""What will happen to each leaf, told from shapes alone: which are pruned, how far, and why the others are not."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_distributions, text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater.pruner import PlannedPruner
from jaxpruner.mask_calculator import calculators, joint_leaves, selection
from jaxpruner.sparsity_types import (
    Block,
    Channel,
    GroupedType,
    Leaf,
    NByM,
    SparsityType,
    is_joint,
    is_unstructured,
    leaf_of,
)

_UNKNOWN = '?'


@dataclasses.dataclass(frozen=True)
class LeafPlan(Leaf):
    """What will happen to one leaf; what is known of it anyway has the names that `Leaf` gives.

    Attributes:
      kept: how many weights have a mask of 1 at the target; `None` where that depends on more than shapes.
      size: how many weights there are.
      why_dense: why nothing is removed; `None` where something is.
      is_ranked_with_others: one ranking holds several leaves, so that `target` counts in the mean alone.

    >>> import jaxpruner
    >>> leaf = jaxpruner.MagnitudePruning(sparsity_type='2:4').plan({'w': jnp.ones((3, 8))})['w']
    >>> leaf.target, leaf.kept, leaf.size
    (0.5, 12, 24)
    """

    kept: int | None
    size: int
    why_dense: str | None
    is_ranked_with_others: bool = False

    @property
    def is_pruned(self) -> bool:
        """Whether weights are removed."""
        return self.why_dense is None


@dataclasses.dataclass(frozen=True)
class PruningPlan:
    """What will happen to each leaf of a model, as `pruner.plan(params)` tells it.

    It is iterated leaf by leaf, indexed by a path (`('a', 'b')` or `'a/b'`), and printed as a table of 80 columns, in
    which three or more equal layers have one row: `'layers/{0-23}/kernel'`, with the sums of `kept` and `of`.

    Attributes:
      algorithm: the name of the pruner's class.
      leaves: the plan of each leaf, in the tree's order.
      kept: how many weights of all leaves are kept; `None` where that depends on more than shapes.
      note: what the plan does not know, so that fewer leaves may be pruned; empty where it knows all.
      updates: what mask updates do besides; empty where sparsity says all.

    >>> import jaxpruner
    >>> params = {'bias': jnp.ones(4), 'kernel': jnp.ones((8, 4))}
    >>> print(jaxpruner.MagnitudePruning(sparsity_type='2:4').plan(params))
    MagnitudePruning prunes 1 of 2 leaves
    leaf    shape  dtype    type, or why it stays dense           target  kept  of
    ------------------------------------------------------------------------------
    bias    4      float32  dense: the default filter leaves out       -     4   4
                            1-D leaves
    kernel  8×4    float32  2:4 along axis -1                        0.5    16  32
    ------------------------------------------------------------------------------
    total                                                         0.4444    20  36
    """

    algorithm: str
    leaves: tuple[LeafPlan, ...]
    kept: int | None
    note: str = ''
    updates: str = ''

    @property
    def size(self) -> int:
        """How many weights there are."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def pruned(self) -> tuple[LeafPlan, ...]:
        """The leaves of which weights are removed."""
        return tuple(leaf for leaf in self.leaves if leaf.is_pruned)

    def __iter__(self) -> Iterator[LeafPlan]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __getitem__(self, path: str | tree_lib.Path) -> LeafPlan:
        name = path if isinstance(path, str) else tree_lib.path_string(tuple(path))
        # Names of two paths may be equal; then the first leaf is meant.
        by_name = {leaf.name: leaf for leaf in reversed(self.leaves)}
        if name not in by_name:
            raise KeyError(
                f'there is no leaf {name!r}; {tree_lib.nearest(name, [leaf.name for leaf in self.leaves])}'
            )
        return by_name[name]

    def __str__(self) -> str:
        columns = [
            text_tables.Column('leaf', overflow='fold'),
            text_tables.Column('shape', overflow='fold'),
            text_tables.Column('dtype'),
            text_tables.Column('type, or why it stays dense', overflow='wrap'),
            text_tables.Column('target', align='right'),
            text_tables.Column('kept', align='right'),
            text_tables.Column('of', align='right'),
        ]
        share = _UNKNOWN if self.kept is None else f'{1 - self.kept / max(self.size, 1):.4g}'
        total = ['total', '', '', '', share, _count(self.kept), _count(self.size)]
        names = [leaf.name for leaf in self.leaves]
        alike = [(*_texts(leaf), leaf.kept is None) for leaf in self.leaves]
        rows = []
        for name, indices in text_tables.group_layers(names, alike):
            *texts, is_unknown = alike[indices[0]]
            kept = None if is_unknown else sum(self.leaves[i].kept or 0 for i in indices)
            size = sum(self.leaves[i].size for i in indices)
            rows.append([name, *texts, _count(kept), _count(size)])
        table = text_tables.to_text(columns, rows, total)
        up_to = 'up to ' if self.note else ''
        title = f'{self.algorithm} prunes {up_to}{len(self.pruned)} of {len(self.leaves)} leaves'
        notes = [
            *textwrap.wrap(self.note, text_tables.WIDTH),
            *textwrap.wrap(self.updates, text_tables.WIDTH),
        ]
        return '\n'.join([title, *notes, table])


def plan_leaves(pruner: PlannedPruner, params: tree_lib.PyTree) -> PruningPlan:
    """Tells what a pruner will do; see `BaseUpdater.plan`."""
    params = tree_lib.as_arrays(params)
    paths, arrays, treedef = tree_lib.flatten_with_paths(params)
    targets = tree_lib.leaves_like(treedef, pruner.get_target_sparsities(params))
    reasons = _reasons(pruner, params)
    is_alone = _are_ranked_alone(pruner, paths)
    ranks_model = pruner.ranked_together == 'model'
    is_in_model_ranking = [ranks_model and not alone for alone in is_alone]
    # One ranking over the model has one total, so that the target of any leaf prunes the others, too.
    model_ranking_prunes = False
    for target, is_ranked in zip(targets, is_in_model_ranking, strict=True):
        if is_ranked and _may_prune(target):
            model_ranking_prunes = True
    planned = []
    for i, leaf in enumerate(pruner._leaves(paths, arrays)):
        unpruned = unpruned_leaf(leaf.path, arrays[i], leaf.sparsity_type, leaf.layer_axis)
        shares_target = is_in_model_ranking[i] and model_ranking_prunes
        leaf_plan = with_target(unpruned, targets[i], reasons[i], is_alone[i], shares_target)
        if shares_target and leaf_plan.is_pruned:
            leaf_plan = dataclasses.replace(leaf_plan, is_ranked_with_others=True)
        planned.append(leaf_plan)
    if all(is_alone):
        for i, number in joint_leaves.kept_weights(planned, targets):
            planned[i] = _with_kept(planned[i], number)
    kept = _kept_in_all(planned, is_in_model_ranking)
    return PruningPlan(type(pruner).__name__, tuple(planned), kept)


def unpruned_leaf(
    path: tree_lib.Path, array: Any, sparsity_type: SparsityType | None, layer_axis: int | None
) -> LeafPlan:
    """Plans a leaf before its target is known, given its array or shape."""
    leaf = leaf_of(path, array, sparsity_type, layer_axis)
    size = math.prod(leaf.shape)
    return LeafPlan(**vars(leaf), kept=size, size=size, why_dense=None)


def _may_prune(target: Any) -> bool:
    return target is not None and (tree_lib.is_traced(target) or float(target) > 0)


def _are_ranked_alone(pruner: PlannedPruner, paths: Sequence[tree_lib.Path]) -> list[bool]:
    """Tells for each leaf whether its weights are ranked among themselves, by the rules of its type."""
    if calculators.own_topk_fn(pruner.topk_fn) is not None:
        return [False] * len(paths)
    if pruner.ranked_together == 'leaf':
        return [not pruner.overrides('create_masks')] * len(paths)
    # Of all leaves that are ranked together, those with a sparsity of their own are left out.
    named = sparsity_distributions.check_custom_map(getattr(pruner, 'custom_sparsity_map', None))
    rules = tree_lib.first_matches(named, paths, 'custom_sparsity_map')
    return [rule is not None for rule in rules]


def _reasons(pruner: PlannedPruner, params: tree_lib.PyTree) -> list[str]:
    """Tells for each leaf why it has no target, if it has none."""
    if pruner.overrides('get_target_sparsities'):
        return [f'{type(pruner).__name__} gives it no target'] * len(jax.tree.leaves(params))
    return sparsity_distributions.why_dense(pruner.distribution(), params, pruner.stacked)


def with_target(
    leaf: LeafPlan, target: Any, reason: str, is_counted: bool, shares_target: bool = False
) -> LeafPlan:
    """Plans a leaf with its target, and what follows from it.

    Args:
      leaf: as `unpruned_leaf` makes it.
      target: the share to remove, `None` for none; may be traced.
      reason: why it has no target, if it has none.
      is_counted: whether shapes say how many of its weights are kept.
      shares_target: whether the targets of other leaves prune it, too, so that its own may be 0.
    """
    why_dense = _why_unranked(leaf, target, reason)
    if why_dense is not None:
        return dataclasses.replace(leaf, why_dense=why_dense)
    if tree_lib.is_traced(target):
        return dataclasses.replace(leaf, kept=None)
    leaf = dataclasses.replace(leaf, target=float(target))
    if leaf.target == 0 and not shares_target:
        return dataclasses.replace(leaf, why_dense='its target is 0')
    kept = None
    if is_counted and not is_joint(leaf.sparsity_type):  # tied leaves are counted together
        kept = _kept(leaf)
    why_dense = 'less than one weight would go' if kept == leaf.size else None
    return dataclasses.replace(leaf, kept=kept, why_dense=why_dense)


def _why_unranked(leaf: LeafPlan, target: Any, reason: str) -> str | None:
    """Tells why a leaf is in no ranking; `None` if it is in one."""
    if leaf.sparsity_type is None:
        return 'its sparsity type is None'
    if not jnp.issubdtype(leaf.dtype, jnp.number):
        return 'it holds no numbers that can be ranked'
    return reason if target is None else None


def _with_kept(leaf: LeafPlan, kept: int) -> LeafPlan:
    """Plans a leaf that shares groups with others; its target is what they leave of it."""
    leaf = dataclasses.replace(leaf, kept=kept, target=1 - kept / leaf.size, why_dense=None)
    if kept == leaf.size:
        return dataclasses.replace(leaf, why_dense='its groups lose less than one channel')
    return leaf


def _kept(leaf: LeafPlan) -> int | None:
    """Counts the weights that a leaf keeps at its target, if it is ranked by itself."""
    if not leaf.size:
        return 0
    layers = 1 if leaf.layer_axis is None else leaf.shape[leaf.layer_axis]
    kept = _kept_of_layer(leaf)
    return None if kept is None else layers * kept


def _kept_of_layer(leaf: LeafPlan) -> int | None:
    shape, sparsity_type = leaf.layer_shape, leaf.sparsity_type
    size = math.prod(shape)
    assert leaf.target is not None
    if isinstance(sparsity_type, NByM):
        length = sparsity_type.line_length(shape)
        return size // length * sparsity_type.kept_in_line(length)
    if is_unstructured(sparsity_type):
        return selection.number_to_keep_on_host(size, leaf.target)
    assert isinstance(sparsity_type, GroupedType)
    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    groups = jax.eval_shape(sparsity_type.group_scores, scores).size
    kept = selection.number_to_keep_on_host(groups, leaf.target)
    if kept == groups:
        return size
    return size // groups * kept if _has_equal_groups(sparsity_type, shape, groups) else None


def _has_equal_groups(sparsity_type: Any, shape: tuple[int, ...], groups: int) -> bool:
    """Whether all groups are known to be of one size: blocks at the edges may have fewer weights."""
    if type(sparsity_type) is Block:
        lengths = zip(reversed(shape), reversed(sparsity_type.block_shape), strict=False)
        return all(length % block == 0 for length, block in lengths)
    return type(sparsity_type) is Channel or groups == math.prod(shape)


def _kept_in_all(leaves: Sequence[LeafPlan], is_in_model_ranking: Sequence[bool]) -> int | None:
    """Counts the kept weights of all leaves; those in one ranking over the model are counted together."""
    unknown = [leaf for leaf in leaves if leaf.kept is None]
    total = sum(leaf.kept or 0 for leaf in leaves)
    if not unknown:
        return total
    if not any(is_in_model_ranking) or any(leaf.target is None for leaf in unknown):
        return None
    # One ranking holds every leaf that has a target, those with a target of 0, too.
    size, removed, counted = 0, 0.0, 0
    for i, leaf in enumerate(leaves):
        if is_in_model_ranking[i] and leaf.target is not None:
            size += leaf.size
            removed += leaf.target * leaf.size
            counted += leaf.kept or 0
    return total - counted + selection.number_to_keep_on_host(size, removed / size)


def _texts(leaf: LeafPlan) -> list[str]:
    """Writes what equal layers have in common."""
    layers = 'each layer, ' if leaf.is_stacked else ''
    if leaf.layer_axis:
        layers = f'each layer of axis {leaf.layer_axis}, '
    words = layers + type_words(leaf.sparsity_type)
    if leaf.is_ranked_with_others:
        words += ', ranked together'
    if leaf.why_dense:
        words = f'dense: {leaf.why_dense}'
    target = '-' if leaf.target is None and leaf.why_dense else _UNKNOWN
    if leaf.target is not None:
        target = f'{leaf.target:.4g}'
    shape = '×'.join(map(str, leaf.shape)) or 'scalar'
    return [shape, str(leaf.dtype), words, target]


def type_words(sparsity_type: SparsityType | None) -> str:
    """Describes a sparsity type in words, such as `2:4 along axis -1`."""
    match sparsity_type:
        case NByM(n, m):
            return f'{n}:{m} along {sparsity_type.axis_words}'
        case Block((height, width)):
            return f'blocks of {height}×{width}'
        case Channel(axis):
            return f'channels of axis {axis}'
    if is_joint(sparsity_type):
        return 'channels, together with other leaves'
    return 'unstructured' if is_unstructured(sparsity_type) else repr(sparsity_type)


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else f'{number:,}'
