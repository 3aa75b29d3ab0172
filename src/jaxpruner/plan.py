"""What will happen to each leaf, told from shapes alone: which are pruned, how far, and why the others are not."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator, selection, sparsity_distributions, text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import (
    INPUT_AXIS,
    Block,
    Channel,
    Leaf,
    NByM,
    is_joint,
    is_unstructured,
)
from jaxpruner.tree import PyTree

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
        leaves = {leaf.name: leaf for leaf in self.leaves}
        if name not in leaves:
            raise KeyError(f'there is no leaf {name!r}; {tree_lib.nearest(name, leaves)}')
        return leaves[name]

    def __str__(self) -> str:
        columns = [
            text_tables.Column('leaf', overflow='fold'),
            text_tables.Column('shape', overflow='fold'),
            text_tables.Column('dtype'),
            text_tables.Column('type, or why it stays dense', overflow='wrap'),
            *(text_tables.Column(name, align='right') for name in ('target', 'kept', 'of')),
        ]
        texts = list(map(_texts, self.leaves))
        rows = []
        for name, indices in text_tables.group_layers([leaf.name for leaf in self.leaves], texts):
            kept = _sum([self.leaves[i].kept for i in indices])
            size = sum(self.leaves[i].size for i in indices)
            rows.append([name, *texts[indices[0]], _count(kept), _count(size)])
        share = _UNKNOWN if self.kept is None else f'{1 - self.kept / max(self.size, 1):.4g}'
        total = ['total', '', '', '', share, _count(self.kept), _count(self.size)]
        up_to = 'up to ' if self.note else ''
        return '\n'.join(
            [
                f'{self.algorithm} prunes {up_to}{len(self.pruned)} of {len(self.leaves)} leaves',
                *textwrap.wrap(self.note, text_tables.WIDTH),
                text_tables.to_text(columns, rows, total),
            ]
        )


def plan_leaves(pruner: Any, params: PyTree) -> PruningPlan:
    """Tells what a pruner will do; see `BaseUpdater.plan`."""
    params = tree_lib.as_arrays(params)
    paths, arrays, treedef = tree_lib.flatten_with_paths(params)
    leaves = pruner.describe_leaves(paths, arrays)
    targets = tree_lib.leaves_like(treedef, pruner.get_target_sparsities(params))
    for i, leaf in enumerate(leaves):
        if leaf.sparsity_type is None or not jnp.issubdtype(leaf.dtype, jnp.number):
            targets[i] = None
    # In one ranking over the model, leaves with a sparsity of their own are left out.
    named = getattr(pruner, 'custom_sparsity_map', None)
    alone = sparsity_distributions.custom_sparsities(named, paths)
    together = [pruner.ranked_together == 'model' and i not in alone for i in range(len(leaves))]
    known = {
        i: float(target)
        for i, target in enumerate(targets)
        if target is not None and not tree_lib.is_traced(target)
    }
    # One total: the target of any leaf in the ranking prunes the others, too.
    others_prune = any(
        is_ranked and target is not None and known.get(i, 1) > 0
        for i, (is_ranked, target) in enumerate(zip(together, targets, strict=True))
    )
    kept_of = _kept_by_leaf(pruner, leaves, known, together)
    planned = []
    for i, leaf in enumerate(leaves):
        size, kept, target, why_dense = math.prod(leaf.shape), kept_of.get(i), known.get(i), None
        is_ranked = together[i] and others_prune
        is_tied = is_joint(leaf.sparsity_type)
        if targets[i] is None:
            why_dense = _why_without_target(pruner, leaf)
        elif target == 0 and not is_ranked and not is_tied:
            why_dense = 'its target is 0'
        elif kept is not None:
            target = 1 - kept / size if is_tied else target
            what = 'channel' if is_tied else 'weight'
            why_dense = f'less than one {what} would go' if kept == size else None
        leaf_plan = LeafPlan(
            **{**vars(leaf), 'target': target},
            kept=size if why_dense else kept,
            size=size,
            why_dense=why_dense,
            is_ranked_with_others=is_ranked and why_dense is None,
        )
        planned.append(leaf_plan)
    return PruningPlan(type(pruner).__name__, tuple(planned), _kept_in_all(planned, together))


def _kept_by_leaf(pruner, leaves, targets, together):
    """Counts the kept weights of leaves, by their indices, as far as shapes and known targets tell them."""
    if mask_calculator.own_topk_fn(pruner.topk_fn) is not None:
        return {}
    kept = {}
    for i, target in targets.items():
        kind = leaves[i].sparsity_type
        # Whatever is ranked together, of N:M the shape says how many are kept.
        keeps_n_of_m = isinstance(kind, NByM) and kind.axis != INPUT_AXIS
        is_counted = pruner.ranked_together != 'other' and not together[i]
        if (keeps_n_of_m or is_counted) and not is_joint(kind):
            kept[i] = _kept(leaves[i], target)
    if pruner.ranked_together == 'leaf':
        is_told = [i in targets for i in range(len(leaves))]
        for sparsity_type, indices in mask_calculator.tied_leaves(leaves, is_told):
            shapes = {path: leaves[i].shape for path, i in indices.items()}
            own = {path: targets[i] for path, i in indices.items()}
            for path, number in sparsity_type.kept_weights(shapes, own).items():
                kept[indices[path]] = number
    return kept


def _why_without_target(pruner, leaf):
    """Says why a pruner gives a leaf no target."""
    if leaf.sparsity_type is None:
        return 'its sparsity type is None'
    if not jnp.issubdtype(leaf.dtype, jnp.number):
        return 'it holds no numbers that can be ranked'
    distribution = pruner.distribution()
    if distribution is None:
        return f'{type(pruner).__name__} gives it no target'
    filter_fn = sparsity_distributions.filter_of(distribution)
    if filter_fn is None:
        return f'{_name_of(distribution, "sparsity_distribution_fn")} gives it no target'
    custom = sparsity_distributions.check_custom_map(
        distribution.keywords.get('custom_sparsity_map')
    )
    if tree_lib.matches_any(tuple(custom), leaf.path):
        return 'custom_sparsity_map says None'
    if not tree_lib.holds_weights(leaf):
        return f'{leaf.dtype} is pruned only where custom_sparsity_map names it'
    if filter_fn is sparsity_distributions.NOT_DIM_ONE_FILTER:
        return f'the default filter leaves out {len(leaf.layer_shape)}-D leaves'
    return f'{_name_of(filter_fn, "filter_fn")} leaves it out'


def _name_of(function, otherwise):
    return getattr(function, '__name__', '<lambda>').replace('<lambda>', otherwise)


def _kept(leaf, target):
    """Counts the weights that a leaf keeps, each layer at its target, if groups are of one size; else `None`."""
    shape, kind = leaf.layer_shape, leaf.sparsity_type
    size = math.prod(shape)
    if not size:
        return 0
    layers = math.prod(leaf.shape) // size
    if isinstance(kind, NByM):
        return layers * kind.kept_of_shape(shape)
    groups, kept = count_groups(leaf, target)
    # Blocks at the edges may have fewer weights.
    blocks = reversed(kind.block_shape) if type(kind) is Block else ()
    are_whole = all(n % block == 0 for n, block in zip(reversed(shape), blocks, strict=False))
    if kept == groups or groups == size or (type(kind) in (Block, Channel) and are_whole):
        return layers * size * kept // groups
    return None


def count_groups(leaf: Leaf, target: Any) -> tuple[int, int]:
    """Counts the groups of weights in a layer of a leaf, and those that a target keeps."""
    kind: Any = leaf.sparsity_type
    groups = math.prod(leaf.layer_shape)
    if not is_unstructured(kind):
        scores = jax.ShapeDtypeStruct(leaf.layer_shape, jnp.float32)
        groups = jax.eval_shape(kind.group_scores, scores).size
    return groups, selection.number_to_keep_on_host(groups, target)


def _kept_in_all(leaves, together):
    """Counts the kept weights of all leaves; those in one ranking over the model are counted together."""
    counts, ranked = [], []
    for leaf, is_ranked in zip(leaves, together, strict=True):
        if is_ranked and leaf.target is not None:
            ranked.append(leaf)
        else:
            counts.append(leaf.kept)
    if ranked:
        size = sum(leaf.size for leaf in ranked)
        removed = sum(leaf.target * leaf.size for leaf in ranked)
        counts.append(selection.number_to_keep_on_host(size, removed / max(size, 1)))
    return _sum(counts)


def _sum(counts):
    return None if None in counts else sum(counts)


def _texts(leaf):
    """Writes what equal layers have in common."""
    words = type_words(leaf.sparsity_type)
    if leaf.layer_axis is not None:
        axis = f' of axis {leaf.layer_axis}' if leaf.layer_axis else ''
        words = f'each layer{axis}, {words}'
    if leaf.is_ranked_with_others:
        words += ', ranked together'
    if leaf.why_dense:
        words = f'dense: {leaf.why_dense}'
    target = '-' if leaf.target is None and leaf.why_dense else _UNKNOWN
    if leaf.target is not None:
        target = f'{leaf.target:.4g}'
    return '×'.join(map(str, leaf.shape)) or 'scalar', str(leaf.dtype), words, target


def type_words(sparsity_type: Any) -> str:
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


def _count(number):
    return _UNKNOWN if number is None else f'{number:,}'
