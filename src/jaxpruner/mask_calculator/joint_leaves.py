"""Leaves that a sparsity type ties together: their groups are ranked once, and each leaf gets its share of the verdict.

The groups take the place of the leaves. A group that has weights in several leaves has one score, pooled over all of
them, and the sparsity of one leaf, its leader. Other leaves of a group need not have a sparsity of their own: biases,
which the default filter leaves out, are removed with their channel.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.calculators import (
    MASK_DTYPE,
    LeafMask,
    ScoredLeaf,
    TopkFn,
    mask_leaves,
)
from jaxpruner.sparsity_types import Groups, Leaf, Unstructured, is_joint

# Leaves that get a mask for the sake of others: on their own they keep everything.
FOLLOWER = 0.0


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Leaves of one type that ties them: path -> index among all leaves, and path -> shape."""

    sparsity_type: Any
    indices: dict[tree_lib.Path, int] = dataclasses.field(default_factory=dict)
    shapes: dict[tree_lib.Path, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def groups(self, values: Sequence[Any]) -> list[Any]:
        """Lists the groups whose leader has a value."""
        pruned = []
        for groups in self.sparsity_type.join(self.shapes):
            if values[self.indices[groups.leader]] is not None:
                pruned.append(groups)
        return pruned

    def members(self, groups: Any) -> list[tree_lib.Path]:
        """Lists those members that are among the leaves."""
        return [path for path in groups.members if path in self.indices]


def with_targets(
    leaves: Sequence[Leaf],
    targets: Sequence[Any],
    can_be_ranked: Sequence[bool],
) -> list[Any]:
    """Gives each member of a pruned group a target, and takes it from leaves of no such group.

    Args:
      leaves: of a model.
      targets: the share to remove of each; `None` where dense.
      can_be_ranked: whether each holds numbers and has a type.

    Raises:
      ValueError: masks of these leaves do not remove the groups, or leaves are not those that their type ties.
    """
    tied = list(targets)
    for joined in _joined(leaves, can_be_ranked):
        pruned = joined.groups(targets)
        leaders: set[tree_lib.Path] = set()
        members: set[tree_lib.Path] = set()
        for groups in pruned:
            leaders.add(groups.leader)
            members.update(groups.members)
        for path, index in joined.indices.items():
            if path not in leaders:
                tied[index] = FOLLOWER if path in members else None
        masked = [path for path in joined.indices if path in members]
        joined.sparsity_type.check_members(pruned, masked)
    return tied


def mask_joint_leaves(
    leaves: Sequence[Leaf],
    scored: Sequence[ScoredLeaf | None],
    topk_fn: TopkFn | None,
) -> list[LeafMask]:
    """Makes the masks of all leaves of a model; leaves that a type ties are ranked as the groups that they share."""
    requests = list(scored)
    ranked: list[tuple[_Joined, Any]] = []
    for joined in _joined(leaves, [leaf is not None for leaf in scored]):
        for groups in joined.groups(scored):
            requests.append(_scored_groups(joined, groups, scored))
            ranked.append((joined, groups))
        for index in joined.indices.values():
            requests[index] = None
    leaf_masks = mask_leaves(requests, topk_fn)
    masks: dict[int, Any] = {}
    verdicts = leaf_masks[len(leaves) :]
    for (joined, groups), verdict in zip(ranked, verdicts, strict=True):
        assert verdict.mask is not None
        for path in joined.members(groups):
            index = joined.indices[path]
            own_mask = groups.spread(verdict.mask, path)
            masks[index] = masks[index] * own_mask if index in masks else own_mask
    for index, mask in masks.items():
        whole = jnp.broadcast_to(mask, leaves[index].shape)
        leaf_masks[index] = LeafMask(whole.astype(MASK_DTYPE))
    return leaf_masks[: len(leaves)]


def kept_weights(leaves: Sequence[Leaf], targets: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yields for each leaf of a pruned group its index among the leaves, and how many of its weights are kept.

    Args:
      leaves: of a model.
      targets: of each, as `with_targets` returns them. Nothing is told of leaves whose targets are traced.
    """
    for joined in _joined(leaves, [target is not None for target in targets]):
        counts = []
        for groups in joined.groups(targets):
            target = targets[joined.indices[groups.leader]]
            if tree_lib.is_traced(target):
                return
            count = selection.number_to_keep_on_host(groups.size, float(target))
            counts.append((groups, count))
        for path, index in joined.indices.items():
            yield index, joined.sparsity_type.kept_weights(counts, path)


def _joined(leaves: Sequence[Leaf], is_included: Sequence[bool]) -> list[_Joined]:
    """Finds the types that tie leaves, each with those of its leaves that are included."""
    by_type: dict[int, _Joined] = {}
    for index, leaf in enumerate(leaves):
        sparsity_type = leaf.sparsity_type
        if not is_included[index] or not is_joint(sparsity_type):
            continue
        if leaf.is_stacked:
            raise ValueError(
                f'{leaf.name}: {sparsity_type!r} knows which layers are stacked; leave the leaf out of `stacked`'
            )
        joined = by_type.setdefault(id(sparsity_type), _Joined(sparsity_type))
        joined.indices[leaf.path] = index
        joined.shapes[leaf.path] = leaf.shape
    return list(by_type.values())


def _scored_groups(
    joined: _Joined,
    groups: Any,
    scored: Sequence[ScoredLeaf | None],
) -> ScoredLeaf:
    """Describes groups as a leaf, each of whose weights is a group."""
    scores = {}
    for path in joined.members(groups):
        leaf = scored[joined.indices[path]]
        assert leaf is not None
        scores[path] = selection.read(leaf.scores)
    leader = scored[joined.indices[groups.leader]]
    assert leader is not None
    each_alone = Groups(Unstructured(), groups.is_stacked)
    return ScoredLeaf(groups.pool(scores), leader.sparsity, each_alone)
