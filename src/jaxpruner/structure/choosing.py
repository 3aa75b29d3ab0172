"""Chooses which channels stay: `ChannelGraph.choose`.

Take `relu(x @ up + bias) @ down` with 4 hidden units, and the budget `'flops=0.5'`. Each member of the group scores the
4 channels by magnitude:

    up      sum of the magnitudes in a column     4   6   8  10    divided by the mean, 7    0.57 0.86 1.14 1.43
    bias    magnitude of an element               0   0   0   0    zeros stay                0    0    0    0
    down    sum of the magnitudes in a row        1   1   1   1    divided by the mean, 1    1    1    1    1

The scores of the channels are the sums of the last columns: 1.57, 1.86, 2.14 and 2.43. The channel with the lowest
score goes first. The operations of both products are proportional to the number of units. So two units have to go, and
units 2 and 3 stay.
"""

import bisect
import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.batches import as_inputs, first_batch
from jaxpruner.structure import latency
from jaxpruner.structure.axes import Axes, atoms, sizes_of
from jaxpruner.structure.costs import Cost, cost_function
from jaxpruner.structure.cut import Cut, Lists, check_keep
from jaxpruner.structure.groups import Group
from jaxpruner.structure.programs import is_array
from jaxpruner.structure.scores import NORMALISATIONS, REDUCTIONS, Normalise, Scorer, read_score
from jaxpruner.tree import Path, PyTree

Names = str | Sequence[str]
_Groups = Mapping[str, Group]
_Counts = Mapping[str, int]
_QUANTITIES = ('parameters', 'flops', 'bytes', 'latency')
_RANKINGS = ('each', 'all', 'alike')


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """The channels of a model that stay. Made by `ChannelGraph.choose`, and printed as a table.

    Attributes:
      keep: for `ChannelGraph.shrink`: name of a group -> indices that stay, ascending, or an array of such lists of
        shape `(*sizes of Group.lists, kept)`. Groups that stay whole have no entry.
      counts: name of a group -> how many of its channels stay, for all groups.
      scores: name of a group -> the scores of its channels, of shape `(*sizes of Group.lists, channels)`, for the
        groups that were ranked. They leave out weights that the other groups remove.
      before: parameters, FLOPs and bytes of the model.
      after: parameters, FLOPs and bytes of the smaller model.
      sizes: name of a group -> how many channels it has.
      remarks: name of a group -> why it was not ranked.
      milliseconds: of the whole model and of the smaller one, timed in turns; `None` unless the budget is a latency.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
    >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
    >>> choice = graph.choose(params, counts={'up[1]': 1})
    >>> choice.keep['up[1]'].tolist(), choice.before.parameters, choice.after.parameters
    ([3], 12, 3)
    """

    keep: Mapping[str, np.ndarray]
    counts: Mapping[str, int]
    scores: Mapping[str, np.ndarray]
    before: Cost
    after: Cost
    sizes: Mapping[str, int]
    remarks: Mapping[str, str]
    milliseconds: tuple[float, float] | None = None

    def score_share(self, name: str) -> float:
        """The share of a group's scores that its kept channels have."""
        if name not in self.keep:
            return 1.0
        table = self.scores[name]
        lists = np.broadcast_to(self.keep[name], (*table.shape[:-1], self.counts[name]))
        total = table.sum()
        kept = np.take_along_axis(table, lists, axis=-1).sum()
        return float(kept / total) if total else float('nan')

    def __repr__(self) -> str:
        return f'Choice({len(self.keep)} of {len(self.counts)} groups get smaller)'

    def __str__(self) -> str:
        columns = [
            text_tables.Column('group', overflow='fold'),
            text_tables.Column('stay', align='right'),
            text_tables.Column('of', align='right'),
            text_tables.Column('score that stays', align='right'),
        ]
        rows = []
        for name, count in self.counts.items():
            share = f'{self.score_share(name):.3f}' if name in self.scores else ''
            rows.append([name, str(count), str(self.sizes[name]), share])
        if self.remarks:
            columns.append(text_tables.Column('remark', overflow='wrap'))
            for row in rows:
                row.append(self.remarks.get(row[0], ''))
        totals = []
        for name, before, after in zip(
            ('parameters', 'FLOPs', 'bytes'), self.before, self.after, strict=True
        ):
            share = f'{after / before:.3f}' if before else ''
            totals.append((name, f'{before:,}', f'{after:,}', share))
        if self.milliseconds is not None:
            before, after = self.milliseconds
            row = 'milliseconds', f'{before:.3g}', f'{after:.3g}', f'{after / before:.3f}'
            totals.append(row)
        columns_of_totals = [
            text_tables.Column('the model'),
            *[text_tables.Column(name, align='right') for name in ('before', 'after', 'share')],
        ]
        return '\n\n'.join(
            [text_tables.to_text(columns, rows), text_tables.to_text(columns_of_totals, totals)]
        )


def choose(
    graph: Any,
    params: PyTree,
    budget: str | None = None,
    *,
    counts: Mapping[str, int] | None = None,
    score: Any = 'magnitude',
    reduce: str = 'sum',
    normalise: str | Normalise | None = 'mean',
    ranking: str = 'each',
    round_to: int | Mapping[str, int] = 1,
    least: float | Mapping[str, float] = 0.0,
    greatest: float | Mapping[str, float] = 1.0,
    leave: Names = (),
    depth: bool = False,
    gradients: PyTree | None = None,
    batches: Iterable[Any] | None = None,
    allow_inexact: bool = False,
    progress: bool = True,
) -> Choice:
    """Chooses which channels stay: those with the highest scores that fit into a budget.

    In each member, the scores of a channel's weights are summed and divided by the member's mean. The score of the
    channel is the sum over the members, or what `reduce` says. Where `Group.lists` has atoms, each of their indices
    (layer of a scan, expert, head) keeps channels of its own, and all keep the same number.

    The scores of the whole model decide how many channels stay. Each group is then ranked once more, without the
    weights that the other groups remove. So a head does not count for features that go, nor a feature for heads
    that go.

    Groups are given by names or globs. `*` and `?` are special in globs, brackets are not. If several globs of a
    mapping match a group, the first one counts.

    Args:
      graph: the graph whose method this is.
      params: arrays, on any devices. Sharded arrays are scored where they are.
      budget: `'parameters=0.5'`, `'flops=0.5'`, `'bytes=0.5'` or `'latency=0.5'`: the share of the whole model's
        that stays. For latency a handful of candidates are compiled and timed on the device at hand.
      counts: name or glob of groups -> how many channels stay, instead of a budget. Other groups stay whole.
      score: one of these. The name of an algorithm (`'magnitude'`, `'saliency'`, `'wanda'`, `'ria'`, `'random'`,
        ...). An algorithm, such as `RandomPruning(rng_seed=1)`. A tree like `params`, of arrays or `None`. A
        function of the matrix whose rows are a group's channels in one member, `(channels, weights of each)`. It
        returns numbers of shape `(channels,)` or `(channels, weights)`, which are summed, or `None` for no score.
        It also gets the arguments that it names: `gradients` (such a matrix), `member` and `group`.
      reduce: over a group's members, `'sum'`, `'mean'` or `'max'`.
      normalise: what each member's scores are divided by, `'mean'` or `'max'`. `'standard'` makes their mean 0 and
        their standard deviation 1, and `None` leaves them. Or a function of the array of a member's scores.
      ranking: which channels are ranked together: those of each group (`'each'`), of all groups (`'all'`), or of
        groups of like shape (`'alike'`). Each ranking loses the same share.
      round_to: the number of channels that stay is a multiple of this, or all of them. For all groups, or by glob.
      least: the least share of a group that stays, for all groups or by glob.
      greatest: the greatest share of a group that stays, likewise.
      leave: names or globs of groups that are left alone.
      depth: whether layers of a scan may go, too (`Group.is_depth`). With `counts` it is enough to name them.
      gradients: a tree like `params`, for scores by gradients.
      batches: for calibrated scores, and the first one for latency. By default the inputs of the graph. A tuple
        holds the inputs, after the state if there is one; anything else is the only input.
      allow_inexact: whether to cut groups for which this is not the same as zeroing them.
      progress: show a bar while calibrating and timing, if stderr is a terminal and rich is installed.

    Returns:
      The channels that stay, in `Choice.keep`. It is printed as a table.

    Raises:
      TypeError: a setting has the wrong type, or parameters have no values.
      KeyError: a name or glob matches no group.
      ValueError: both or neither of budget and counts, a setting that is unknown or has no effect, a budget or
        limits that cannot be met, scores that are not finite, one array for two leaves, or counts that the number
        of devices does not divide.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
    >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
    >>> choice = graph.choose(params, 'flops=0.5')
    >>> print(choice)
    group  stay  of  score that stays
    ---------------------------------
    up[1]     2   4             0.571
    <BLANKLINE>
    the model   before  after  share
    --------------------------------
    parameters      12      6  0.500
    FLOPs          120     60  0.500
    bytes           48     24  0.500
    >>> graph.shrink(params, choice.keep)['up'].tolist()
    [[2.0, 3.0], [6.0, 7.0]]
    """
    if (budget is None) == (counts is None):
        given = f'budget={budget!r}, counts={counts!r}'
        raise ValueError(f'give either a budget or counts; got {given}')
    _check_choice('reduce', reduce, REDUCTIONS)
    _check_choice('ranking', ranking, _RANKINGS)
    if normalise is not None and not callable(normalise):
        _check_choice('normalise', normalise, [name for name in NORMALISATIONS if name])
    _check_numbers('least', least, 'number', 0, 1)
    _check_numbers('greatest', greatest, 'number', 0, 1)
    _check_numbers('round_to', round_to, 'whole number', 1, math.inf)
    _check_params(graph, params)
    groups: _Groups = graph.groups
    leaves = dict(graph.trace.named_leaves)
    cost = cost_function(graph)
    samples = graph.model.examples
    if batches is not None:
        first, batches = first_batch(batches)
        samples = as_inputs(first)
    elif samples is not None:
        batches = [samples]

    remarks = {}  # why a group is not ranked
    if counts is not None:
        of_search = {
            'ranking': (ranking, 'each'),
            'round_to': (round_to, 1),
            'least': (least, 0.0),
            'greatest': (greatest, 1.0),
            'leave': (leave, ()),
            'depth': (depth, False),
        }
        for setting, (value, default) in of_search.items():
            if value != default:
                raise ValueError(
                    f'{setting}={value!r} has no effect with counts, which say how many channels stay; leave it out'
                )
        given = _by_group(counts, groups, 'counts', None)
        counts = {name: count for name, count in given.items() if count is not None}
        for name, count in counts.items():
            if count != groups[name].size and not (groups[name].exact or allow_inexact):
                raise ValueError(
                    f'counts: removing channels of {name} is not the same as zeroing them: {groups[name].reason}; '
                    'leave it out, or pass allow_inexact=True and train the smaller model'
                )
        cost(counts)  # refuses invalid counts
        remarks = dict.fromkeys(groups.keys() - counts.keys(), 'not named')
    else:
        left = matching(leave, groups, 'leave')
        for name, group in groups.items():
            if name in left:
                remarks[name] = 'left alone'
            elif not (group.exact or allow_inexact):
                remarks[name] = 'not exact'
            elif group.is_depth and not depth:
                remarks[name] = 'layers: depth=True'
    candidates = {name: group for name, group in groups.items() if name not in remarks}
    if not candidates:
        reasons = [f'{name} ({remark})' for name, remark in remarks.items()]
        words = ', '.join(reasons) or 'the model has none'
        raise ValueError(f'there is no group to choose from: {words}')
    quantity, share = ('', 1.0) if budget is None else _parse_budget(budget)
    least_shares = _by_group(least, candidates, 'least', 0.0)
    greatest_shares = _by_group(greatest, candidates, 'greatest', 1.0)
    multiples = _by_group(round_to, candidates, 'round_to', 1)
    limits = {
        name: _Limits.of(group, least_shares[name], greatest_shares[name], multiples[name])
        for name, group in candidates.items()
    }
    _check_shared(graph, params, candidates)

    apply_fn = graph.model.apply_fn
    score_name, score_member = read_score(score, params, apply_fn, gradients, batches, progress)
    scorer = Scorer(leaves, score_name, score_member, reduce, normalise)
    tables = {name: scorer.score(group, Cut({})) for name, group in candidates.items()}
    milliseconds = None
    if budget is not None:
        shapes = {name: _shape_of(group, leaves) for name, group in candidates.items()}
        order = _RemovalOrder(tables, limits, shapes, ranking)
        if quantity == 'latency':
            seconds = latency.latency_function(graph, params, samples)

            def counts_at(removed: float) -> dict[str, int]:
                return order.counts(round(removed * len(order))) if removed else {}

            removed = latency.least_removal(
                lambda removed: seconds(counts_at(removed)), share, progress=progress
            )
            counts = order.counts(round(removed * len(order)))
            milliseconds = 1e3 * seconds({}), 1e3 * seconds(counts)
        else:
            counts = _meet(quantity, share, order, lambda c: getattr(cost(c), quantity))
    assert counts is not None
    _check_shards(graph, params, counts)

    # The first ranking uses the scores of the whole model. There a head still counts for features that go, and a
    # feature for heads that go. So each group is ranked once more, without the weights that the other groups remove.
    smaller = {name: g for name, g in candidates.items() if counts[name] < g.size}
    keep = {
        name: _pick_highest(tables[name], smaller[name], counts[name], candidates)
        for name in smaller
    }
    for name, group in smaller.items():
        others = {other: kept for other, kept in keep.items() if other != name}
        tables[name] = scorer.score(group, check_keep(groups, others, allow_inexact=True))
        keep[name] = _pick_highest(tables[name], group, counts[name], candidates)
    sizes = {name: group.size for name, group in groups.items()}
    return Choice(
        keep=keep,
        counts={**sizes, **counts},
        scores=tables,
        before=cost({}),
        after=cost(counts),
        sizes=sizes,
        remarks=remarks,
        milliseconds=milliseconds,
    )


def _pick_highest(table: np.ndarray, group: Group, count: int, groups: _Groups) -> np.ndarray:
    """The indices of the highest scores. Of two equal scores the one with the lower index stays."""
    earlier = list(groups.values())[: list(groups).index(group.name)]
    if any(_owns_lists(group, other) and _owns_lists(other, group) for other in earlier):
        table = table.reshape(-1, group.size).sum(axis=0)
    highest_first = np.argsort(-table, axis=-1, kind='stable')
    return np.sort(highest_first[..., :count], axis=-1)


def _owns_lists(owner: Group, group: Group) -> bool:
    return owner.atom.resolved() in [atom.resolved() for atom in group.lists]


def _check_choice(setting: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f'{setting}={value!r}: {tree_lib.nearest(str(value), choices)}')


def _check_numbers(setting: str, value: Any, noun: str, lower: float, upper: float) -> None:
    """Refuses a setting that is no such number, nor a mapping to such numbers."""
    for number in value.values() if isinstance(value, Mapping) else [value]:
        is_whole = hasattr(number, '__index__') and not isinstance(number, bool)
        if not (is_whole or (noun == 'number' and tree_lib.is_number(number))):
            raise TypeError(f'{setting}={number!r}: give a {noun}, or a mapping of globs to them')
        if not lower <= number <= upper:
            words = f'from {lower} to {upper}' if upper < math.inf else f'{lower} or more'
            raise ValueError(f'{setting}={number!r}: give a {noun}, {words}')


def _check_params(graph: Any, params: PyTree) -> None:
    """Refuses parameters whose leaves differ from those of the model, or have no values."""
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    if list(paths) != list(graph.trace.paths):
        names = sorted(map(tree_lib.path_string, set(paths) ^ set(graph.trace.paths)))
        raise ValueError(
            f'params are not those of the model of the graph: only one of the two has {names}'
        )
    for path, leaf, axes in zip(paths, leaves, graph.trace.leaves, strict=True):
        name = tree_lib.path_string(path)
        if np.shape(leaf) != sizes_of(axes):
            raise ValueError(
                f'{name} has shape {np.shape(leaf)}, but {sizes_of(axes)} in the model'
            )
        if not is_array(leaf):
            raise TypeError(f'{name} has no values to make scores of; give arrays, outside of jit')


def _check_shared(graph: Any, params: PyTree, candidates: _Groups) -> None:
    """Refuses one array as two leaves that would be cut differently."""
    cut_atoms = {group.atom.resolved() for group in candidates.values()}
    of_leaves = [atoms(*axes) for axes in graph.trace.leaves]
    first_with: dict[int, int] = {}  # `id` of an array -> its first leaf
    for number, leaf in enumerate(jax.tree.leaves(params)):
        first = first_with.setdefault(id(leaf), number)
        own, other = of_leaves[number], of_leaves[first]
        if own != other and not cut_atoms.isdisjoint(own + other):
            name, first_name = [tree_lib.path_string(graph.trace.paths[i]) for i in (number, first)]
            raise ValueError(
                f'{first_name} and {name} are one array, but their channels are chosen separately; let the model read '
                'one leaf in both places, or copy the array (jax.tree.map(jnp.copy, params)) if they may differ'
            )


def _check_shards(graph: Any, params: PyTree, counts: _Counts) -> None:
    """Refuses sizes that the number of devices along an axis does not divide."""
    groups: _Groups = graph.groups
    cut = Cut({groups[name].atom.resolved(): Lists((), np.arange(n)) for name, n in counts.items()})
    leaves = zip(jax.tree.leaves(params), graph.trace.named_leaves, strict=True)
    for leaf, (path, axes) in leaves:
        sharding = getattr(leaf, 'sharding', None)
        if sharding is None or sharding.is_fully_replicated:
            continue
        for i, (axis, part) in enumerate(zip(axes, sharding.shard_shape(leaf.shape), strict=True)):
            devices = axis.size // max(part, 1)
            if cut.shortens(axis) and cut.size(axis) % devices:
                names = [
                    repr(name)
                    for name, group in groups.items()
                    if counts.get(name, group.size) != group.size
                    and (path, i) in [(member.path, member.axis) for member in group.members]
                ]
                raise ValueError(
                    f'{tree_lib.path_string(path)} lies on {devices} devices along axis {i}, which do not divide the '
                    f'{cut.size(axis)} of {axis.size} that stay; take multiples, round_to={{{", ".join(names)}: …}}'
                )


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
        pattern = str(name).replace('[', '[[]')
        of_name = [g for g in all_groups if g == name or fnmatch.fnmatchcase(g, pattern)]
        if not of_name:
            nearest = tree_lib.nearest(str(name), all_groups)
            raise KeyError(f'{setting}: {name!r} matches no group; {nearest}')
        matches.update(of_name)
    return matches


def _by_group(value: Any, groups: Iterable[str], setting: str, default: Any) -> dict[str, Any]:
    """A setting for each group: one value for all, or that of the first glob in a mapping that matches the group."""
    all_groups = list(groups)
    if not isinstance(value, Mapping):
        return dict.fromkeys(all_groups, value)
    values = dict.fromkeys(all_groups, default)
    for name in reversed(list(value)):
        values.update(dict.fromkeys(matching(name, all_groups, setting), value[name]))
    return values


def _parse_budget(text: Any) -> tuple[str, float]:
    """Reads `'flops=0.5'`."""
    if not isinstance(text, str):
        raise TypeError(f"budget is text such as 'flops=0.5', got {text!r}")
    quantity, _, number = text.partition('=')
    if quantity not in _QUANTITIES:
        raise ValueError(f'budget={text!r}: {tree_lib.nearest(quantity, _QUANTITIES)}')
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(
            f'budget={text!r}: give the share that stays, between 0 and 1, such as {quantity}=0.5'
        )
    return quantity, share


class _Limits(NamedTuple):
    """How many channels of a group may stay.

    Attributes:
      least: the least number that may stay.
      most: the greatest number that may stay.
      multiple: the number that stays is a multiple of this, or all of them.
    """

    least: int
    most: int
    multiple: int

    @classmethod
    def of(cls, group: Group, least: float, greatest: float, multiple: int) -> '_Limits':
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
        lower = min(math.ceil(max(1, math.ceil(least * size)) / multiple) * multiple, size)
        upper = size if greatest == 1 else math.floor(greatest * size) // multiple * multiple
        if upper < lower:
            raise ValueError(
                f'no multiple of {multiple} lies between least={least} and greatest={greatest} of {group.name}, {size} '
                'channels; take a smaller round_to, or other shares'
            )
        return cls(lower, upper, multiple)

    def count(self, kept: int, size: int) -> int:
        """How many of `size` channels stay if so many have to."""
        multiple = math.ceil(kept / self.multiple) * self.multiple
        return min(max(min(multiple, size), self.least), self.most)

    def above(self, count: int) -> int:
        """The next larger count, or the same if there is none."""
        return min((count // self.multiple + 1) * self.multiple, self.most)


class _RemovalOrder:
    """The order in which channels go, and how many of each group stay after a number of steps.

    One channel goes with each step. Channels of a pool are ranked together, and the lowest score goes first. The pool
    is one group, all groups, or groups of like shape. All pools lose the same share at the same time:

        pool a, 4 channels   goes at 1/4, 2/4, 3/4, 1     after 3 steps   a has lost 2 of 4
        pool b, 2 channels   goes at 1/2, 1                               b has lost 1 of 2

    So a search only has to find the number of steps. With more steps, each group keeps fewer channels.

    >>> tables = {'up': np.array([2.0, 1.0, 6.0, 5.0]), 'gate': np.array([3.0, 4.0, 7.0, 8.0])}
    >>> arguments = tables, dict.fromkeys(tables, _Limits(1, 4, 1)), dict.fromkeys(tables)
    >>> _RemovalOrder(*arguments, 'all').counts(3), _RemovalOrder(*arguments, 'each').counts(4)
    ({'up': 2, 'gate': 3}, {'up': 2, 'gate': 2})
    """

    def __init__(
        self,
        tables: Mapping[str, np.ndarray],
        limits: Mapping[str, _Limits],
        shapes: Mapping[str, Hashable],
        ranking: str,
    ):
        self._limits = limits
        self._names = list(tables)
        # The scores that are lost with the first channel, with the second one and so on.
        losses = [np.sort(t.reshape(-1, t.shape[-1])).mean(axis=0) for t in tables.values()]
        self._sizes = list(map(len, losses))
        pools: dict[Hashable, list[int]] = defaultdict(list)
        for number, name in enumerate(tables):
            pools[{'each': number, 'all': None, 'alike': shapes[name]}[ranking]].append(number)
        times, losers = [], []  # when a channel goes, and the number of the group that loses it
        for pool in pools.values():
            scores = np.concatenate([losses[number] for number in pool])
            loser_of_score = np.repeat(pool, [self._sizes[number] for number in pool])
            losers.append(loser_of_score[np.argsort(scores, kind='stable')])
            times.append(np.arange(1, len(scores) + 1) / len(scores))
        earliest_first = np.argsort(np.concatenate(times), kind='stable')
        self._losers = np.concatenate(losers)[earliest_first]

    def __len__(self) -> int:
        return len(self._losers)

    def counts(self, number: int) -> dict[str, int]:
        """How many channels of each group stay after this number of steps."""
        losses = np.bincount(self._losers[:number], minlength=len(self._names)).tolist()
        triples = zip(self._names, self._sizes, losses, strict=True)
        return {name: self._limits[name].count(size - lost, size) for name, size, lost in triples}

    def with_one_more(self, counts: _Counts, number: int) -> Iterator[_Counts]:
        """Yields for each group that lost a channel its next larger count. The group that lost one last comes first."""
        for loser in dict.fromkeys(self._losers[:number][::-1].tolist()):
            name = self._names[loser]
            yield {name: self._limits[name].above(counts[name])}


def _meet(
    quantity: str, share: float, order: _RemovalOrder, measure: Callable[[_Counts], float]
) -> dict[str, int]:
    """Finds how many channels of each group stay so that the budget is met with the fewest removals.

    If there is room left, groups get one more channel, or one more multiple.

    Raises:
      ValueError: the budget cannot be met.
    """
    whole = measure({})
    least = measure(order.counts(len(order)))
    if least > share * whole:
        raise ValueError(
            f"budget='{quantity}={share:g}' cannot be met: {least / whole:.4f} of the {quantity} stay even if all "
            'channels go that may go; give a larger share, or loosen least, round_to, leave or allow_inexact'
        )

    def is_met(number: int) -> bool:
        return measure(order.counts(number)) <= share * whole

    number = bisect.bisect_left(range(len(order)), True, key=is_met)
    counts = order.counts(number)
    # The last removal may have been a large one, such as a whole multiple.
    for more in order.with_one_more(counts, number):
        if measure({**counts, **more}) <= share * whole:
            counts.update(more)
    return counts


def _shape_of(group: Group, leaves: Mapping[Path, Axes]) -> Hashable:
    """A key that groups of like shape share: their size, and the shapes and axes of their members."""
    members = []
    for member in group.members:
        shape = sizes_of(leaves[member.path])
        members.append((shape, member.axis, member.offset, member.stride, member.repeats))
    return group.size, sizes_of(group.lists), group.is_depth, tuple(sorted(members))
