"""Chooses which channels stay: `ChannelGraph.choose`.

Take `relu(x @ up + bias) @ down` with 4 hidden units, and the budget `'flops=0.5'`. Each member of the group scores the
4 channels by magnitude:

    up      sum of the magnitudes in a column     4   6   8  10    divided by the mean, 7    0.57 0.86 1.14 1.43
    bias    magnitude of an element               0   0   0   0    zeros stay                0    0    0    0
    down    sum of the magnitudes in a row        1   1   1   1    divided by the mean, 1    1    1    1    1

The scores of the channels are the sums of the last columns: 1.57, 1.86, 2.14 and 2.43. The channel with the lowest
score goes first. The operations of both products are proportional to the number of units. So two units have to go, and
units 2 and 3 stay.

Where `Group.lists` has atoms, such as layers of a scan, there are such scores for each of their indices. An algorithm
of the library scores each weight of each leaf. A function gets the matrix whose rows are a group's channels, and
returns a score for each row or for each weight.
"""

import bisect
import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import api, checks, oneshot, text_tables
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.oneshot.leaves import first_batch
from jaxpruner.structure import small_model
from jaxpruner.structure.channel_tables import ChannelTable
from jaxpruner.structure.costs import Cost, Counts, cost_function, latency_function
from jaxpruner.structure.cut import Cut, check_keep
from jaxpruner.structure.groups import Group, Member
from jaxpruner.structure.programs import Trace
from jaxpruner.tree import Path, PyTree

Names = str | Sequence[str]
_LATENCIES = 32  # of so many removals in even steps, a search times five or six
_QUANTITIES = ('parameters', 'flops', 'bytes', 'latency')


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
        table = self.scores[name]
        if name not in self.keep:
            return 1.0
        lists = np.broadcast_to(self.keep[name], (*table.shape[:-1], self.counts[name]))
        kept, total = np.take_along_axis(table, lists, axis=-1).sum(), table.sum()
        return float(kept / total) if total else float('nan')

    def __repr__(self) -> str:
        rows = []
        for name, count in self.counts.items():
            share = f'{self.score_share(name):.3f}' if name in self.scores else ''
            counts = str(count), str(self.sizes[name])
            rows.append([name, *counts, share, self.remarks.get(name, '')])
        headings = ['group', 'stay', 'of', 'score that stays', 'remark']
        if not self.remarks:
            rows, headings = [row[:-1] for row in rows], headings[:-1]
        costs: list[tuple[str, float, float, str]]
        costs = [
            *zip(('parameters', 'FLOPs', 'bytes'), self.before, self.after, ',,,', strict=True)
        ]
        if self.milliseconds is not None:
            costs.append(('milliseconds', *self.milliseconds, '.3g'))
        cost_rows = []
        for label, before, after, style in costs:
            share = f'{after / before:.3f}' if before else ''
            cost_rows.append([label, f'{before:{style}}', f'{after:{style}}', share])
        of_costs = _table(['the model', 'before', 'after', 'share'], cost_rows)
        return f'{_table(headings, rows)}\n\n{of_costs}'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of names and their numbers."""
    columns = [text_tables.Column(heading, align='right') for heading in headings]
    columns[0] = text_tables.Column(headings[0], overflow='fold')
    return text_tables.to_text(columns, rows)


def choose(
    graph: Any,
    params: PyTree,
    budget: str | None = None,
    *,
    counts: Mapping[str, int] | None = None,
    score: Any = 'magnitude',
    ranking: str = 'each',
    round_to: int = 1,
    leave: Names = (),
    gradients: PyTree | None = None,
    batches: Iterable[Any] | None = None,
    allow_inexact: bool = False,
    progress: bool = True,
) -> Choice:
    """Chooses which channels stay: those with the highest scores that fit into a budget.

    In each member, the scores of a channel's weights are summed and divided by the member's mean. The score of the
    channel is the sum over the members. Where `Group.lists` has atoms, each of their indices
    (layer of a scan, expert, head) keeps channels of its own, and all keep the same number.

    All groups lose the same share of their channels, but for rounding, until the budget is met. Or channels of all
    groups are ranked together, and the lowest scores go first. Layers of a scan (`Group.is_depth`) only go if `counts`
    names them. The weights of a channel that other groups remove do not count: a head does not count for features that
    go, nor a feature for heads that go.

    Groups are given by names or globs. `*` and `?` are special in globs, brackets are not. If several globs of a
    mapping match a group, the first one counts.

    Args:
      graph: the graph whose method this is.
      params: arrays, on any devices. Sharded arrays are scored where they are.
      budget: `'parameters=0.5'`, `'flops=0.5'`, `'bytes=0.5'` or `'latency=0.5'`: the share of the whole model's
        that stays. For latency a handful of candidates are compiled and timed on the device at hand.
      counts: name or glob of groups -> how many channels stay, instead of a budget. Other groups stay whole.
      score: one of these. The name of an algorithm (`'magnitude'`, `'saliency'`, `'wanda'`, `'ria'`, `'random'`,
        ...). An algorithm, such as `RandomPruning(rng_seed=1)`. A function of the matrix whose rows are a group's
        channels in one member, `(channels, weights of each)`. It returns numbers of shape `(channels,)` or
        `(channels, weights)`, which are summed, or `None` for no score. It also gets the arguments that it names:
        `gradients` (such a matrix), `member` and `group`.
      ranking: which channels are ranked together: those of each group (`'each'`), or of all groups (`'all'`).
      round_to: the number of channels that stay is a multiple of this, or all of them.
      leave: names or globs of groups that are left alone.
      gradients: a tree like `params`, for scores by gradients, or of anything that the function `score` reads.
      batches: for calibrated scores, and the first one for latency. By default the inputs of the graph. A tuple
        holds the inputs, after the state if there is one; anything else is the only input.
      allow_inexact: whether to cut groups for which this is not the same as zeroing them.
      progress: show a bar while calibrating, if stderr is a terminal and rich is installed.

    Returns:
      The channels that stay, in `Choice.keep`. It is printed as a table.

    Raises:
      TypeError: a setting has the wrong type, or parameters are traced.
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
        raise ValueError(f'give a budget or counts; got budget={budget!r}, counts={counts!r}')
    if counts is not None and (round_to != 1 or leave or ranking != 'each'):
        raise ValueError('ranking, round_to and leave have no effect with counts; leave them out')
    if ranking not in ('each', 'all'):
        raise ValueError(f"ranking={ranking!r}: give 'each' or 'all'")
    if not (isinstance(round_to, int) and round_to >= 1):
        raise ValueError(f'round_to={round_to!r}: give a whole number, 1 or more')
    of_params, _ = small_model.parts_of(graph)
    of_params.check(params, Cut({}))
    source, groups = graph.trace.source, graph.groups
    sizes = {name: group.size for name, group in groups.items()}
    if batches is None and source.examples is not None:
        batches = [source.examples]
    first, batches = (None, None) if batches is None else first_batch(batches)
    read = _read_score(score, params, source.apply_fn, gradients, batches, progress)
    milliseconds, remarks = None, {}
    if counts is not None:
        ranked = counts = _counts_of_groups(counts, sizes)
    else:
        left = matching(leave, groups, 'leave')
        for name, group in groups.items():
            if name in left:
                remarks[name] = 'left alone'
            elif not (group.exact or allow_inexact):
                remarks[name] = 'not exact'
            elif group.is_depth:
                remarks[name] = 'layers: name them in counts='
        ranked = {name: size for name, size in sizes.items() if name not in remarks}
        if not ranked:
            raise ValueError(f'there is no group to choose from: {remarks or "the model has none"}')

    def scored(name: str, others: Mapping[str, np.ndarray]) -> np.ndarray:
        """Scores the channels of a group, without the weights that the other groups remove."""
        others = {other: kept for other, kept in others.items() if other != name}
        cut = check_keep(groups, others, allow_inexact=True)
        return _score_group(graph.trace, groups[name], cut, read)

    tables = {name: scored(name, {}) for name in ranked}
    if counts is None:
        removals = _removals(tables, ranking, round_to)
        counts, milliseconds = _meet(graph, params, budget, removals, round_to, first)
    stay = {**sizes, **counts}

    def highest(name: str) -> np.ndarray:
        """The channels of a group with the highest scores. Of equal ones the first stay."""
        highest_first = np.argsort(-tables[name], axis=-1, kind='stable')
        return np.sort(highest_first[..., : stay[name]], axis=-1)

    keep = {name: highest(name) for name in ranked}
    keep = {name: kept for name, kept in keep.items() if stay[name] < sizes[name]}
    # These scores are of the whole model. There a head still counts for features that go, and a feature for heads that
    # go. So each group is ranked once more, without the weights that the other groups remove.
    for name in keep:
        tables[name] = scored(name, keep)
        keep[name] = highest(name)
    check_keep(groups, keep, allow_inexact)
    before, after = map(cost_function(graph), ({}, stay))
    return Choice(keep, stay, tables, before, after, sizes, remarks, milliseconds)


class _Score(NamedTuple):
    """What scores channels.

    Attributes:
      function: of matrices whose rows are channels; `None` if the arrays are scores of weights.
      arrays: `'weights'`, and perhaps `'gradients'` -> path of a leaf -> an array of its shape, or `None`.
    """

    function: Callable[..., Any] | None
    arrays: Mapping[str, Mapping[Path, Any]]


def _read_score(
    score: Any,
    params: PyTree,
    apply_fn: Callable[..., Any],
    gradients: PyTree | None,
    batches: Iterable[Any] | None,
    progress: bool,
) -> _Score:
    """Reads the setting `score` of `ChannelGraph.choose`.

    Raises:
      TypeError: the setting is of no allowed type.
      ValueError: the algorithm is unknown or has no scores, or gradients or batches are missing.
    """
    if isinstance(score, str):
        score = api.create_updater_from_config({'algorithm': score})
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    name, algorithm = type(score).__name__, score
    function, of_leaves = None, {'weights': leaves}
    if not isinstance(score, BaseUpdater):
        if not callable(score):
            raise TypeError(
                "score is an algorithm or its name, such as 'magnitude', or a function of the matrix whose rows are "
                f'channels; got {score!r}'
            )
        function = score
        if gradients is not None:
            of_leaves['gradients'] = tree_lib.leaves_like(treedef, gradients)
    elif hasattr(algorithm, 'score_matrices'):
        if batches is None:
            raise ValueError(f'{name} reads inputs: give batches=…, or make the graph with arrays')
        calibration = oneshot.calibrate(apply_fn, params, batches, progress=progress)
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            parts = []
            for matrices, statistics in calibration.get(path, ()):
                weights = matrices.read(leaf)
                of_matrices = algorithm.score_matrices(weights, statistics.second_moment)
                parts.append(matrices.write(of_matrices, leaf))
            leaves[i] = sum(parts) if parts else None
    elif isinstance(score, oneshot.CalibratedPruning | oneshot.PruningAtInitialization):
        raise ValueError(f"{name} scores no channels; take 'wanda', or 'saliency' with gradients=…")
    else:
        try:
            of_weights = score.calculate_scores(params, grads=gradients)
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f'{name} has no scores for these parameters ({error}); scores by gradients need gradients=…, and '
                'scores that are gathered in training are not available here'
            ) from error
        of_leaves['weights'] = tree_lib.leaves_like(treedef, of_weights)
    by_path = {key: dict(zip(paths, own, strict=True)) for key, own in of_leaves.items()}
    return _Score(function, by_path)


def _score_group(trace: Trace, group: Group, cut: Cut, score: _Score) -> np.ndarray:
    """The scores of a group's channels, of shape `(*sizes of Group.lists, channels)`.

    Weights that the cut removes count as zero.

    Raises:
      ValueError: a score is not finite, or no member has a score.
    """
    table = ChannelTable.of(trace, group, {path: path for path in trace.leaves})
    of_members = []
    for member in group.members:
        arrays = {key: by_path.get(member.path) for key, by_path in score.arrays.items()}
        if any(array is None for array in arrays.values()):
            continue
        arrays = {key: cut.zero(array, trace.leaves[member.path]) for key, array in arrays.items()}
        if score.function is None:
            scores = table.add_up({member.path: arrays['weights']}, member)
        else:
            scores = _ask(score.function, table, member, arrays)
        if scores is None:
            continue
        scores = np.asarray(scores, np.float64)
        if not np.isfinite(scores).all():
            raise ValueError(
                f'scores of {group.name} for {member.name} are not finite; look for NaN or inf in that leaf, in the '
                'gradients and in the batches'
            )
        mean = np.abs(scores).mean()
        of_members.append(scores / mean if mean > 0 else scores)
    if not of_members:
        raise ValueError(
            f'{group.name}: no member of the group has a score; leave the group alone with leave={group.name!r}, or '
            'take another score'
        )
    return np.sum(of_members, axis=0)


def _ask(
    function: Callable[..., Any], table: ChannelTable, member: Member, arrays: Mapping[str, Any]
) -> np.ndarray | None:
    """Asks a function for the scores of each list of channels in a member; `None` if it has none."""
    matrices = {key: table.rows(array, member.path, member) for key, array in arrays.items()}
    scores = np.empty(table.shape)
    for index in np.ndindex(*scores.shape[:-1]):
        of_list = {key: matrix[index] for key, matrix in matrices.items()}
        weights = of_list.pop('weights')
        own = checks.call(function, weights, group=table.group, member=member, **of_list)
        if own is None:
            return None
        if jnp.shape(own) not in (weights.shape, weights.shape[:1]):
            raise ValueError(
                f'{member.name}: score gets {weights.shape[0]} channels of {weights.shape[1]} weights, and returns '
                f'one number for each channel or each weight; got shape {jnp.shape(own)}'
            )
        scores[index] = np.asarray(own, np.float64).reshape(len(own), -1).sum(axis=1)
    return scores


def _counts_of_groups(counts: Counts, sizes: Counts) -> dict[str, int]:
    """Checks how many channels are to stay, and says it of each group: the first glob that matches counts."""
    of_groups = {}
    for glob, count in reversed(list(counts.items())):
        for name in matching(glob, sizes, 'counts'):
            if count not in range(1, sizes[name] + 1):
                raise ValueError(f'counts[{name!r}] is {count!r}; it can be 1 to {sizes[name]}')
            of_groups[name] = int(count)
    return of_groups


def _removals(
    tables: Mapping[str, np.ndarray], ranking: str, round_to: int
) -> list[tuple[str, int]]:
    """The removals in their order: each leaves a group with its next smaller count.

    >>> tables = {'up': np.array([2.0, 1.0, 6.0, 5.0]), 'gate': np.array([3.0, 4.0])}
    >>> _removals(tables, 'all', 1), _removals(tables, 'each', 2)
    ([('up', 3), ('up', 2), ('gate', 1), ('up', 1)], [('up', 2)])
    """
    removals: list[tuple[float, str, int]] = []
    for name, table in tables.items():
        size = table.shape[-1]
        # Where a group has lists, what they lose together with their first channel, and so on.
        losses = np.sort(table).reshape(-1, size).mean(axis=0).tolist()
        for count in reversed(range(round_to, size, round_to)):
            lost = size - count
            removals.append((lost / size if ranking == 'each' else losses[lost - 1], name, count))
    return [(name, count) for _, name, count in sorted(removals, key=lambda removal: removal[0])]


def _meet(
    graph: Any,
    params: PyTree,
    budget: Any,
    removals: Sequence[tuple[str, int]],
    round_to: int,
    batch: Any,
) -> tuple[dict[str, int], tuple[float, float] | None]:
    """Finds how many channels stay under a budget, by the fewest of these removals.

    Returns:
      Name of a group -> how many stay; and milliseconds before and after, if the budget is a latency.

    Raises:
      ValueError: the budget is none, or cannot be met.
    """
    quantity, _, number = str(budget).partition('=')
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if quantity not in _QUANTITIES or not 0 < share < 1:
        words = f'{", ".join(_QUANTITIES)}, and the share that stays, between 0 and 1'
        raise ValueError(f"budget={budget!r}: give one of {words}, such as 'flops=0.5'")
    cost = cost_function(graph)

    def measure_cost(counts: Counts) -> float:
        return getattr(cost(counts), quantity)

    measure: Callable[[Counts], float] = measure_cost
    numbers: Sequence[int] = range(len(removals) + 1)
    if quantity == 'latency':
        # Each candidate is compiled and timed, so that the search is coarse.
        numbers = np.linspace(0, len(removals), _LATENCIES + 1).astype(int).tolist()
        measure = latency_function(graph, params, batch)
    whole, least = measure({}), measure(dict(removals))
    most = share * whole
    if least > most:
        raise ValueError(
            f'budget={budget!r} cannot be met: {least / whole:.4f} of the whole stay even if all channels go that may '
            'go; give a larger share, or loosen round_to, leave or allow_inexact'
        )
    index = bisect.bisect_left(numbers, -most, key=lambda n: -measure(dict(removals[:n])))
    done = removals[: numbers[index]]
    counts = dict(done)
    if quantity == 'latency':
        return counts, (1e3 * whole, 1e3 * measure(counts))
    # The last removal may have been a large one, such as a whole multiple. What still fits comes back, to the groups
    # that lost last first.
    for name in dict(reversed(done)):
        larger = {**counts, name: min(counts[name] + round_to, graph.groups[name].size)}
        counts = larger if measure(larger) <= most else counts
    return counts, None


def matching(names: Names, groups: Collection[str], setting: str) -> list[str]:
    """The names of the groups that some names or globs match, in the order of the groups.

    Raises:
      KeyError: one of them matches no group.

    >>> matching('*/up/*', ['0/up/kernel[1]', '1/up/kernel[1]', 'head[0]'], 'leave')
    ['0/up/kernel[1]', '1/up/kernel[1]']
    """
    matches: set[str] = set()
    for name in tree_lib.as_names(names):
        pattern = str(name).replace('[', '[[]')
        of_name = [group for group in groups if fnmatch.fnmatchcase(group, pattern)]
        if not of_name:
            nearest = tree_lib.nearest(str(name), groups)
            raise KeyError(f'{setting}: {name!r} matches no group; {nearest}')
        matches.update(of_name)
    return [group for group in groups if group in matches]
