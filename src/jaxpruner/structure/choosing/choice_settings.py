"""The settings of `ChannelGraph.choose`: they are checked, and read for each group.

Groups are given by names or by globs. In globs `*` and `?` are wildcards, and brackets stand for themselves.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes
from jaxpruner.structure.analysis.members import Group
from jaxpruner.structure.choosing import channel_scores, ranking
from jaxpruner.tree import Path, PyTree

Names = str | Sequence[str]
Groups = Mapping[str, Group]


def _check_numbers(setting: str, value: Any, noun: str, lower: float, upper: float) -> None:
    """Refuses a setting that is no such number, nor a mapping to such numbers."""
    numbers = value.values() if isinstance(value, Mapping) else [value]
    for number in numbers:
        is_whole = hasattr(number, '__index__') and not isinstance(number, bool)
        is_allowed = noun != 'whole number' and tree_lib.is_number(number)
        if not (is_whole or is_allowed):
            raise TypeError(f'{setting}={number!r}: give a {noun}, or a mapping of globs to them')
        if not lower <= number <= upper:
            words = f'from {lower} to {upper}' if upper < math.inf else f'{lower} or more'
            raise ValueError(f'{setting}={number!r}: give a {noun}, {words}')


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `ChannelGraph.choose`; see there."""

    budget: str | None = None
    counts: Mapping[str, int] | None = None
    score: Any = 'magnitude'
    reduce: str = 'sum'
    normalise: str | channel_scores.Normalise | None = 'mean'
    ranking: str = 'each'
    round_to: int | Mapping[str, int] = 1
    least: float | Mapping[str, float] = 0.0
    greatest: float | Mapping[str, float] = 1.0
    leave: Names = ()
    equal: Names = ()
    depth: bool = False
    gradients: PyTree | None = None
    batches: Iterable[Any] | None = None
    allow_inexact: bool = False
    progress: bool = True

    def __post_init__(self):
        if (self.budget is None) == (self.counts is None):
            given = f'budget={self.budget!r}, counts={self.counts!r}'
            raise ValueError(f'give either a budget or counts; got {given}')
        _check_choice('reduce', self.reduce, channel_scores.REDUCTIONS)
        _check_choice('ranking', self.ranking, ranking.RANKINGS)
        if self.normalise is not None and not callable(self.normalise):
            _check_choice('normalise', self.normalise, channel_scores.NORMALISATIONS)
        for setting in ('least', 'greatest'):
            _check_numbers(setting, getattr(self, setting), 'number', 0, 1)
        _check_numbers('round_to', self.round_to, 'whole number', 1, math.inf)
        if self.counts is not None:
            self._check_settings_of_counts()

    def _check_settings_of_counts(self) -> None:
        """Refuses settings that have no effect with counts."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_SEARCH and value != field.default:
                raise ValueError(
                    f'{field.name}={value!r} has no effect with counts, which say how many channels stay; leave it out'
                )


_OF_SEARCH = ('ranking', 'round_to', 'least', 'greatest', 'leave', 'equal', 'depth')


def _check_choice(setting: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        nearest = tree_lib.nearest(str(value), choices)
        raise ValueError(f'{setting}={value!r}: {nearest}')


def matching(names: Names, groups: Iterable[str], setting: str) -> set[str]:
    """The names of the groups that some names or globs match.

    Raises:
      KeyError: one of them matches no group.

    >>> sorted(matching('*/up/*', ['0/up/kernel[1]', '1/up/kernel[1]', 'head[0]'], 'leave'))
    ['0/up/kernel[1]', '1/up/kernel[1]']
    """
    all_groups = list(groups)
    matches: set[str] = set()
    for name in tree_lib.as_names(names):
        matches_name = functools.partial(_matches, str(name))
        matches_of_name = list(filter(matches_name, all_groups))
        if not matches_of_name:
            nearest = tree_lib.nearest(str(name), all_groups)
            raise KeyError(f'{setting}: {name!r} matches no group; {nearest}')
        matches.update(matches_of_name)
    return matches


def _matches(name: str, group: str) -> bool:
    pattern = name.replace('[', '[[]')
    return name == group or fnmatch.fnmatchcase(group, pattern)


def by_group(value: Any, groups: Iterable[str], setting: str, default: Any) -> dict[str, Any]:
    """A setting for each group: one value for all, or that of the first glob in a mapping that matches the group."""
    all_groups = list(groups)
    if not isinstance(value, Mapping):
        return dict.fromkeys(all_groups, value)
    values = dict.fromkeys(all_groups, default)
    for name in reversed(list(value)):
        for group in matching(name, all_groups, setting):
            values[group] = value[name]
    return values


def remarks_of(groups: Groups, settings: Settings) -> dict[str, str]:
    """Name of a group that is no candidate -> why."""
    left = matching(settings.leave, groups, 'leave')
    remarks = {}
    for name, group in groups.items():
        if name in left:
            remarks[name] = 'left alone'
        elif not (group.exact or settings.allow_inexact):
            remarks[name] = 'not exact'
        elif group.is_depth and not settings.depth:
            remarks[name] = 'layers: depth=True'
    return remarks


def named_counts(groups: Groups, settings: Settings) -> dict[str, int]:
    """The given counts, in the order of the groups.

    Raises:
      KeyError: a name matches no group.
      ValueError: a group that is not exact would be cut.
    """
    counts = {}
    counts_or_none = by_group(settings.counts or {}, groups, 'counts', None)
    for name, count in counts_or_none.items():
        group = groups[name]
        if count is None:
            continue
        may_cut = group.exact or settings.allow_inexact
        if count != group.size and not may_cut:
            raise ValueError(
                f'counts: removing channels of {name} is not the same as zeroing them: {group.reason}; leave it out, '
                'or pass allow_inexact=True and train the smaller model'
            )
        counts[name] = count
    return counts


def limits_of_groups(groups: Groups, settings: Settings) -> dict[str, ranking.Limits]:
    """The limits of each candidate."""
    least = by_group(settings.least, groups, 'least', 0.0)
    greatest = by_group(settings.greatest, groups, 'greatest', 1.0)
    multiples = by_group(settings.round_to, groups, 'round_to', 1)
    limits = {}
    for name, group in groups.items():
        shares = least[name], greatest[name]
        limits[name] = ranking.limits_of(group, *shares, multiples[name])
    return limits


def equal_sets(groups: Groups, leaves: Mapping[Path, Axes], equal: Names) -> list[list[Group]]:
    """Sets of groups that keep the same number: those of like shape that match one name. Others are sets of one.

    Raises:
      KeyError: a name matches no group.
      ValueError: a name matches no two groups of like shape, or two names match one group.
    """
    glob_of: dict[str, Any] = {}
    for glob in tree_lib.as_names(equal):
        for name in matching(glob, groups, 'equal'):
            if name in glob_of:
                raise ValueError(
                    f'equal: {glob_of[name]!r} and {glob!r} both match {name}; give one glob for it'
                )
            glob_of[name] = glob
    sets: dict[tuple[str | None, Any], list[Group]] = {}
    for name, group in groups.items():
        key = (None, name)
        if name in glob_of:
            key = (glob_of[name], ranking.shape_of(group, leaves))
        sets.setdefault(key, []).append(group)
    for glob in tree_lib.as_names(equal):
        most = 0
        for (glob_of_set, _), groups_in_set in sets.items():
            if glob_of_set == glob:
                most = max(most, len(groups_in_set))
        if most == 1:
            raise ValueError(
                f'equal: {glob!r} has no effect, since no two groups that it matches have members of like shapes'
            )
    return list(sets.values())
