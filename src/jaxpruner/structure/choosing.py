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
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpruner import text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.batches import as_inputs, first_batch
from jaxpruner.structure import latency
from jaxpruner.structure.axes import Axes, sizes_of
from jaxpruner.structure.costs import Cost, cost_function
from jaxpruner.structure.cut import Cut, check_keep
from jaxpruner.structure.groups import Group
from jaxpruner.structure.programs import is_array
from jaxpruner.structure.scores import Normalise, Scorer, divided_by_mean, read_score
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
    normalise: str | Normalise | None = 'mean',
    ranking: str = 'each',
    round_to: int | Mapping[str, int] = 1,
    least: float | Mapping[str, float] = 0.0,
    leave: Names = (),
    depth: bool = False,
    gradients: PyTree | None = None,
    batches: Iterable[Any] | None = None,
    allow_inexact: bool = False,
    progress: bool = True,
) -> Choice:
    """Chooses which channels stay: those with the highest scores that fit into a budget.

    In each member, the scores of a channel's weights are summed and divided by the member's mean. The score of the
    channel is the sum over the members. Where `Group.lists` has atoms, each of their indices
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
      normalise: what each member's scores are divided by, `'mean'`; `None` leaves them. Or a function of the array of a
        member's scores that returns others.
      ranking: which channels are ranked together: those of each group (`'each'`), of all groups (`'all'`), or of
        groups of like shape (`'alike'`). Each ranking loses the same share.
      round_to: the number of channels that stay is a multiple of this, or all of them. For all groups, or by glob.
      least: the least share of a group that stays, for all groups or by glob.
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
      ValueError: both or neither of budget and counts, a setting that is unknown or has no effect, a budget that
        cannot be met, or scores that are not finite.

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
    if ranking not in _RANKINGS:
        raise ValueError(f'ranking={ranking!r}: {tree_lib.nearest(str(ranking), _RANKINGS)}')
    if normalise == 'mean':
        normalise = divided_by_mean
    elif isinstance(normalise, str):
        raise ValueError(f"normalise={normalise!r}: give 'mean', None or a function of scores")
    _check_params(graph, params)
    groups: _Groups = graph.groups
    cost = cost_function(graph)
    samples = graph.model.examples
    if batches is not None:
        first, batches = first_batch(batches)
        samples = as_inputs(first)
    elif samples is not None:
        batches = [samples]

    allowed: dict[str, list[int]] = {}
    quantity, share = ('', 1.0) if budget is None else _parse_budget(budget)
    if counts is None:
        allowed, remarks = _allowed_counts(groups, round_to, least, leave, depth, allow_inexact)
    else:
        if (ranking, round_to, least, leave, depth) != ('each', 1, 0.0, (), False):
            raise ValueError(
                'ranking, round_to, least, leave and depth have no effect with counts, which say how many channels '
                'stay; leave them out'
            )
        counts, remarks = _given_counts(counts, groups, allow_inexact)
        cost(counts)  # refuses invalid counts
    candidates = {name: group for name, group in groups.items() if name not in remarks}
    if not candidates:
        reasons = [f'{name} ({remark})' for name, remark in remarks.items()]
        words = ', '.join(reasons) or 'the model has none'
        raise ValueError(f'there is no group to choose from: {words}')
    apply_fn = graph.model.apply_fn
    scores = read_score(score, params, apply_fn, gradients, batches, progress)
    scorer = Scorer(graph.trace, *scores, normalise)
    tables = {name: scorer.score(group, Cut({})) for name, group in candidates.items()}

    milliseconds = None
    if counts is None:
        leaves = dict(graph.trace.named_leaves)
        pools: dict[Hashable, list[str]] = defaultdict(list)
        for name, group in candidates.items():
            pool = {'each': name, 'all': None, 'alike': _shape_of(group, leaves)}
            pools[pool[ranking]].append(name)
        order = _RemovalOrder(tables, allowed, pools.values())
        if quantity == 'latency':
            seconds = latency.latency_function(graph, params, samples)
            counts = _meet_latency(share, order, seconds, progress)
            milliseconds = 1e3 * seconds({}), 1e3 * seconds(counts)
        else:
            counts = _meet(quantity, share, order, lambda c: getattr(cost(c), quantity))
    smaller = {name: group for name, group in candidates.items() if counts[name] < group.size}
    keep = {name: _pick_highest(tables[name], counts[name], smaller, name) for name in smaller}
    # The first ranking uses the scores of the whole model. There a head still counts for features that go, and a
    # feature for heads that go. So each group is ranked once more, without the weights that the other groups remove.
    for name, group in smaller.items():
        others = {other: kept for other, kept in keep.items() if other != name}
        tables[name] = scorer.score(group, check_keep(groups, others, allow_inexact=True))
        keep[name] = _pick_highest(tables[name], counts[name], smaller, name)
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


def _pick_highest(table: np.ndarray, count: int, groups: _Groups, name: str) -> np.ndarray:
    """The indices of the highest scores. Of two equal scores the one with the lower index stays."""
    group = groups[name]
    for other in groups.values():
        if other is group:
            break
        if _owns_lists(group, other) and _owns_lists(other, group):  # one of them has one list
            table = table.reshape(-1, group.size).sum(axis=0)
    highest_first = np.argsort(-table, axis=-1, kind='stable')
    return np.sort(highest_first[..., :count], axis=-1)


def _owns_lists(owner: Group, group: Group) -> bool:
    return owner.atom.resolved() in [atom.resolved() for atom in group.lists]


def _check_params(graph: Any, params: PyTree) -> None:
    """Refuses parameters whose leaves differ from those of the model, or have no values."""
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    shapes = dict(zip(paths, map(np.shape, leaves), strict=True))
    own_shapes = {path: sizes_of(axes) for path, axes in graph.trace.named_leaves}
    for path in [*shapes, *own_shapes]:
        shape, own_shape = shapes.get(path), own_shapes.get(path)
        if shape != own_shape:
            raise ValueError(
                f'{tree_lib.path_string(path)} has shape {shape} in params, but {own_shape} in the model of the graph'
            )
    if not all(map(is_array, leaves)):
        raise TypeError('params have no values to make scores of; give arrays, outside of jit')


def _given_counts(
    counts: _Counts, groups: _Groups, allow_inexact: bool
) -> tuple[dict[str, int], dict[str, str]]:
    """How many channels of each group that is named stay, and a remark on each other group."""
    by_group = _by_group(counts, groups, 'counts', None)
    given = {name: count for name, count in by_group.items() if count is not None}
    for name, count in given.items():
        if count != groups[name].size and not (groups[name].exact or allow_inexact):
            raise ValueError(
                f'counts: removing channels of {name} is not the same as zeroing them: {groups[name].reason}; '
                'leave it out, or pass allow_inexact=True and train the smaller model'
            )
    return given, dict.fromkeys(groups.keys() - given.keys(), 'not named')


def _allowed_counts(
    groups: _Groups,
    round_to: int | Mapping[str, int],
    least: float | Mapping[str, float],
    leave: Names,
    depth: bool,
    allow_inexact: bool,
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """How many channels of each group may stay, ascending, and why other groups stay whole."""
    left = matching(leave, groups, 'leave')
    multiples = _by_group(round_to, groups, 'round_to', 1)
    shares = _by_group(least, groups, 'least', 0.0)
    allowed, remarks = {}, {}
    for name, group in groups.items():
        multiple, share = multiples[name], shares[name]
        if not (isinstance(multiple, int) and multiple >= 1):
            raise ValueError(f'round_to={multiple!r}: give a whole number, 1 or more, or a mapping')
        if not (tree_lib.is_number(share) and 0 <= share <= 1):
            raise ValueError(f'least={share!r}: give a number from 0 to 1, or a mapping of globs')
        if name in left:
            remarks[name] = 'left alone'
        elif not (group.exact or allow_inexact):
            remarks[name] = 'not exact'
        elif group.is_depth and not depth:
            remarks[name] = 'layers: depth=True'
        elif multiple > group.size:
            remarks[name] = f'fewer than round_to={multiple}'
        else:
            counts = [*range(multiple, group.size, multiple), group.size]
            allowed[name] = [count for count in counts if count >= share * group.size]
    return allowed, remarks


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
    if not isinstance(value, Mapping):
        return dict.fromkeys(groups, value)
    values = dict.fromkeys(groups, default)
    for name in reversed(list(value)):
        values.update(dict.fromkeys(matching(name, groups, setting), value[name]))
    return values


def _parse_budget(text: Any) -> tuple[str, float]:
    """Reads `'flops=0.5'`."""
    quantity, _, number = str(text).partition('=')
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


class _RemovalOrder:
    """The order in which channels go, and how many of each group stay after a number of steps.

    One channel goes with each step. Channels of a pool are ranked together, and the lowest score goes first. The pool
    is one group, all groups, or groups of like shape. All pools lose the same share at the same time:

        pool a, 4 channels   goes at 1/4, 2/4, 3/4, 1     after 3 steps   a has lost 2 of 4
        pool b, 2 channels   goes at 1/2, 1                               b has lost 1 of 2

    So a search only has to find the number of steps. With more steps, each group keeps fewer channels.

    >>> tables = {'up': np.array([2.0, 1.0, 6.0, 5.0]), 'gate': np.array([3.0, 4.0, 7.0, 8.0])}
    >>> allowed = dict.fromkeys(tables, [1, 2, 3, 4])
    >>> _RemovalOrder(tables, allowed, [['up', 'gate']]).counts(3)
    {'up': 2, 'gate': 3}
    >>> _RemovalOrder(tables, allowed, [['up'], ['gate']]).counts(4)
    {'up': 2, 'gate': 2}
    """

    def __init__(
        self,
        tables: Mapping[str, np.ndarray],
        allowed: Mapping[str, Sequence[int]],
        pools: Iterable[Sequence[str]],
    ):
        self.allowed = allowed
        self._sizes = {name: table.shape[-1] for name, table in tables.items()}
        removals: list[tuple[float, str]] = []  # when a channel goes, and the group that loses it
        for pool in pools:
            losses = []
            for name in pool:
                # The scores that are lost with the first channel, with the second one and so on.
                table = tables[name].reshape(-1, self._sizes[name])
                losses += [(score, name) for score in np.sort(table).mean(axis=0)]
            losses.sort(key=lambda loss: loss[0])
            removals += [((i + 1) / len(losses), name) for i, (_, name) in enumerate(losses)]
        removals.sort(key=lambda removal: removal[0])
        self.losers = [name for _, name in removals]

    def __len__(self) -> int:
        return len(self.losers)

    def counts(self, number: int) -> dict[str, int]:
        """How many channels of each group stay after this number of steps."""
        lost = Counter(self.losers[:number])
        counts = {}
        for name, allowed in self.allowed.items():
            counts[name] = allowed[bisect.bisect_left(allowed, self._sizes[name] - lost[name])]
        return counts


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

    def is_met(counts: _Counts) -> bool:
        return measure(counts) <= share * whole

    number = bisect.bisect_left(range(len(order)), True, key=lambda n: is_met(order.counts(n)))
    counts = order.counts(number)
    # The last removal may have been a large one, such as a whole multiple.
    for name in dict.fromkeys(reversed(order.losers[:number])):
        allowed = order.allowed[name]
        larger = allowed[min(allowed.index(counts[name]) + 1, len(allowed) - 1)]
        if is_met({**counts, name: larger}):
            counts[name] = larger
    return counts


def _meet_latency(
    share: float, order: _RemovalOrder, seconds: Callable[[_Counts], float], progress: bool
) -> dict[str, int]:
    def counts_at(removed: float) -> dict[str, int]:
        return order.counts(round(removed * len(order))) if removed else {}

    removed = latency.least_removal(lambda r: seconds(counts_at(r)), share, progress=progress)
    return order.counts(round(removed * len(order)))


def _shape_of(group: Group, leaves: Mapping[Path, Axes]) -> Hashable:
    """A key that groups of like shape share: their size, and the shapes and axes of their members."""
    members = []
    for member in group.members:
        shape = sizes_of(leaves[member.path])
        members.append((shape, member.axis, member.offset, member.stride, member.repeats))
    return group.size, sizes_of(group.lists), group.is_depth, tuple(sorted(members))
