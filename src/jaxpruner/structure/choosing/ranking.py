"""The order in which channels go, and how many of each group stay after a number of steps.

Channels of a pool are ranked together, and the lowest score goes first. The pool is one group, all groups, or groups
of like shape. All pools lose the same share at the same time:

    pool a, 4 channels   goes at 1/4, 2/4, 3/4, 1     after 3 steps   a has lost 2 of 4
    pool b, 2 channels   goes at 1/2, 1                               b has lost 1 of 2

So a search only has to find the number of steps. With more steps, each group keeps fewer channels.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.structure.analysis.axes import Axes, sizes_of
from jaxpruner.structure.analysis.members import Group
from jaxpruner.tree import Path

Counts = Mapping[str, int]
RANKINGS = ('each', 'all', 'alike')


class Limits(NamedTuple):
    """How many channels of a group may stay.

    Attributes:
      least: the least number that may stay.
      most: the greatest number that may stay.
      multiple: the number that stays is a multiple of this, or all of them.
    """

    least: int
    most: int
    multiple: int

    def count(self, size: int, removed: np.ndarray | int) -> int:
        """How many of `size` channels stay if `removed` of them may go."""
        kept = size - int(removed)
        multiple = math.ceil(kept / self.multiple) * self.multiple
        kept = min(multiple, size)
        return min(max(kept, self.least), self.most)

    def above(self, count: int) -> int:
        """The next larger count, or the same if there is none."""
        next_multiple = (count // self.multiple + 1) * self.multiple
        return min(next_multiple, self.most)


class Bundle(NamedTuple):
    """Groups that keep the same number of channels; mostly one group.

    Attributes:
      names: of the groups.
      size: of each group.
      limits: of each group.
      scores: the score that is lost with the first channel, with the second one and so on.
      shape: equal for groups of like shape.
    """

    names: tuple[str, ...]
    size: int
    limits: Limits
    scores: np.ndarray
    shape: Hashable


class RemovalOrder:
    """The order in which channels go. One channel goes with each step.

    >>> limits = Limits(least=1, most=4, multiple=1)
    >>> up = Bundle(('up',), 4, limits, np.array([1.0, 2.0, 5.0, 6.0]), None)
    >>> gate = Bundle(('gate',), 4, limits, np.array([3.0, 4.0, 7.0, 8.0]), None)
    >>> RemovalOrder([up, gate], 'all').counts(3), RemovalOrder([up, gate], 'each').counts(4)
    ({'up': 2, 'gate': 3}, {'up': 2, 'gate': 2})
    """

    def __init__(self, bundles: Sequence[Bundle], ranking: str):
        self._bundles = bundles
        pools: dict[Hashable, list[int]] = {}
        for number, bundle in enumerate(bundles):
            keys = {'each': number, 'all': None, 'alike': bundle.shape}
            pools.setdefault(keys[ranking], []).append(number)
        times, losers = [], []  # when a channel goes, and the number of the bundle that loses it
        for pool in pools.values():
            sizes = [bundles[number].size for number in pool]
            scores = np.concatenate([bundles[number].scores for number in pool])
            lowest_first = np.argsort(scores, kind='stable')
            bundle_of_score = np.repeat(pool, sizes)
            losers.append(bundle_of_score[lowest_first])
            count = len(scores)
            times.append(np.arange(1, count + 1) / count)
        earliest_first = np.argsort(np.concatenate(times), kind='stable')
        self._losers = np.concatenate(losers)[earliest_first]

    def __len__(self) -> int:
        return len(self._losers)

    def counts(self, number: int) -> dict[str, int]:
        """How many channels of each group stay after this number of steps."""
        losers = self._losers[:number]
        losses = np.bincount(losers, minlength=len(self._bundles))
        counts = {}
        for bundle, removed in zip(self._bundles, losses, strict=True):
            count = bundle.limits.count(bundle.size, int(removed))
            counts.update(dict.fromkeys(bundle.names, count))
        return counts

    def with_one_more(self, counts: Counts, number: int) -> Iterator[Mapping[str, int]]:
        """Yields for each bundle its next larger count. The bundle that lost a channel last comes first."""
        last_first = self._losers[:number][::-1]
        for loser in dict.fromkeys(last_first.tolist()):
            bundle: Bundle = self._bundles[loser]
            count_before = counts[bundle.names[0]]
            count = bundle.limits.above(count_before)
            yield dict.fromkeys(bundle.names, count)


def limits_of(group: Group, least: float, greatest: float, multiple: int) -> Limits:
    """The limits of a group, from shares of its size.

    Raises:
      ValueError: no count meets the limits.
    """
    size = group.size
    if multiple > size:
        raise ValueError(
            f'round_to={multiple} is above the size of {group.name}, {size}; leave it alone with leave=…, or give '
            'multiples by group, round_to={glob: multiple}'
        )
    lower = max(1, math.ceil(least * size))
    lower = min(math.ceil(lower / multiple) * multiple, size)
    upper = size
    if greatest != 1:
        upper = math.floor(greatest * size) // multiple * multiple
    if upper < lower:
        raise ValueError(
            f'no multiple of {multiple} lies between least={least} and greatest={greatest} of {group.name}, {size} '
            'channels; take a smaller round_to, or other shares'
        )
    return Limits(lower, upper, multiple)


def bundle_groups(
    sets: Sequence[Sequence[Group]],
    tables: Mapping[str, np.ndarray],
    limits: Mapping[str, Limits],
    leaves: Mapping[Path, Axes],
) -> list[Bundle]:
    """Makes bundles of sets of groups of like shape."""
    bundles = []
    for groups in sets:
        names = tuple([group.name for group in groups])
        size = groups[0].size
        scores = np.zeros(size)
        for name in names:
            lists = tables[name].reshape(-1, size)
            lists = np.sort(lists)
            scores += lists.mean(axis=0) / len(names)
        common_limits = _common_limits(names, limits)
        shape = shape_of(groups[0], leaves)
        bundles.append(Bundle(names, size, common_limits, scores, shape))
    return bundles


def _common_limits(names: Sequence[str], limits: Mapping[str, Limits]) -> Limits:
    """The limits of several groups of one size.

    Raises:
      ValueError: the limits differ.
    """
    first = limits[names[0]]
    for name in names:
        if limits[name] != first:
            raise ValueError(
                f'equal: {names[0]} and {name} have different limits, {first} and {limits[name]}; give least, greatest '
                'and round_to alike for groups that keep the same number of channels'
            )
    return first


def shape_of(group: Group, leaves: Mapping[Path, Axes]) -> Any:
    """A key that groups of like shape share: their size, and the shapes and axes of their members."""
    members = []
    for member in group.members:
        shape = sizes_of(leaves[member.path])
        members.append((shape, member.axis, member.offset, member.stride, member.repeats))
    owners = sizes_of(group.lists)
    return group.size, owners, group.is_depth, tuple(sorted(members))
