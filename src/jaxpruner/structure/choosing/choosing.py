"""Chooses which channels stay: `ChannelGraph.choose`.

Settings are read for each group (`choice_settings`). Weights get scores (`leaf_scores`), and from these channels get
scores (`channel_scores`). The scores decide the order in which channels go (`ranking`). The budget decides how many go
(`budgets`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.oneshot.batches import as_inputs, first_batch
from jaxpruner.structure.analysis.axes import Axes, resolve_each
from jaxpruner.structure.analysis.members import Group
from jaxpruner.structure.choosing import (
    budgets,
    channel_scores,
    choice_checks,
    choice_settings,
    costs,
    latency,
    ranking,
)
from jaxpruner.structure.choosing.choice_settings import Settings
from jaxpruner.structure.choosing.choices import Choice
from jaxpruner.structure.choosing.leaf_scores import Evidence, scores_of_leaves
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.cutting.keeping import check_keep
from jaxpruner.tree import Path, PyTree

Groups = Mapping[str, Group]
Leaves = Mapping[Path, Axes]
Tables = Mapping[str, np.ndarray]
Counts = Mapping[str, int]


def choose(graph: Any, params: PyTree, settings: Settings) -> Choice:
    """See `ChannelGraph.choose`."""
    choice_checks.check_params(graph, params)
    cost = costs.cost_function(graph)
    samples = _read_samples(graph, settings)
    search = None
    counts: Counts = {}
    if settings.budget is None:
        counts = choice_settings.named_counts(graph.groups, settings)
        cost(counts)  # refuses invalid counts
        not_named = graph.groups.keys() - counts.keys()
        remarks = dict.fromkeys(not_named, 'not named')
        candidates = _candidates(graph.groups, remarks)
    else:
        remarks = choice_settings.remarks_of(graph.groups, settings)
        candidates = _candidates(graph.groups, remarks)
        search = _Search(graph, candidates, settings)
    choice_checks.check_shared(graph, params, candidates)
    scorer = _make_scorer(graph, params, settings, samples.batches)
    tables = {}
    for name, group in candidates.items():
        tables[name] = scorer.score(group, Cut({}))
    milliseconds = None
    if search is not None:
        seconds = None
        if search.budget.quantity == 'latency':
            seconds = latency.latency_function(graph, params, samples.first)
        counts = search.counts(tables, cost, seconds)
        if seconds is not None:
            milliseconds = 1e3 * seconds({}), 1e3 * seconds(counts)
    choice_checks.check_shards(graph, params, counts)
    ranked = _rank(candidates, tables, counts, scorer)
    sizes = {}
    for name, group in graph.groups.items():
        sizes[name] = group.size
    return Choice(
        keep=ranked.keep,
        counts={**sizes, **counts},
        scores=ranked.scores,
        before=cost({}),
        after=cost(counts),
        sizes=sizes,
        remarks=remarks,
        milliseconds=milliseconds,
    )


class _Search:
    """The search for counts that meet a budget. Its settings are checked at once."""

    def __init__(self, graph: Any, candidates: Groups, settings: Settings):
        self.budget = budgets.Budget.parse(settings.budget)
        self._settings = settings
        self._leaves = _leaves(graph)
        self._limits = choice_settings.limits_of_groups(candidates, settings)
        self._sets = choice_settings.equal_sets(candidates, self._leaves, settings.equal)

    def counts(
        self, tables: Tables, cost: costs.CostFunction, seconds: budgets.Measure | None
    ) -> dict[str, int]:
        """How many channels of each candidate stay. `seconds` is given for a budget of latency."""
        settings = self._settings
        bundles = ranking.bundle_groups(self._sets, tables, self._limits, self._leaves)
        order = ranking.RemovalOrder(bundles, settings.ranking)
        if seconds is not None:
            return budgets.meet_latency(self.budget, order, seconds, settings.progress)

        def measure(counts: Counts) -> float:
            return getattr(cost(counts), self.budget.quantity)

        return budgets.meet(self.budget, order, measure)


def _leaves(graph: Any) -> Leaves:
    return dict(graph.trace.named_leaves)


def _candidates(groups: Groups, remarks: Mapping[str, str]) -> dict[str, Group]:
    """The groups without a remark.

    Raises:
      ValueError: there is none.
    """
    candidates = {}
    for name, group in groups.items():
        if name not in remarks:
            candidates[name] = group
    if not candidates:
        reasons = [f'{name} ({remark})' for name, remark in remarks.items()]
        words = ', '.join(reasons) or 'the model has none'
        raise ValueError(f'there is no group to choose from: {words}')
    return candidates


def _make_scorer(
    graph: Any, params: PyTree, settings: Settings, batches: Iterable[Any] | None
) -> channel_scores.Scorer:
    evidence = Evidence(graph.model.apply_fn, settings.gradients, batches, settings.progress)
    scores = scores_of_leaves(settings.score, params, evidence)
    return channel_scores.Scorer(_leaves(graph), scores, settings.reduce, settings.normalise)


class _Samples(NamedTuple):
    """Arguments of the model after the parameters: those of the first batch, and all; `None` if there are none."""

    first: tuple[Any, ...] | None
    batches: Iterable[Any] | None


def _read_samples(graph: Any, settings: Settings) -> _Samples:
    if settings.batches is not None:
        first, batches = first_batch(settings.batches)
        return _Samples(as_inputs(first), batches)
    examples = graph.model.examples
    if examples is None:
        return _Samples(None, None)
    return _Samples(examples, [examples])


class _Ranked(NamedTuple):
    """The indices that stay, and the scores that decided so."""

    keep: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]


def _rank(groups: Groups, tables: Tables, counts: Counts, scorer: channel_scores.Scorer) -> _Ranked:
    """Ranks the channels of each group.

    The first ranking uses the scores of the whole model. There a head still counts for features that go, and a feature
    for heads that go. So each group is ranked once more, without the weights that the other groups remove.
    """
    keep = {}
    for name, group in groups.items():
        count = counts[name]
        if count < group.size:
            keep[name] = _pick_highest(tables[name], group, count, groups)
    scores = dict(tables)
    for name in keep:
        group = groups[name]
        others = dict(keep)
        del others[name]
        cut = check_keep(groups, others, allow_inexact=True)
        scores[name] = scorer.score(group, cut)
        keep[name] = _pick_highest(scores[name], group, counts[name], groups)
    return _Ranked(keep, scores)


def _pick_highest(table: np.ndarray, group: Group, count: int, groups: Groups) -> np.ndarray:
    """The indices of the highest scores. Of two equal scores the one with the lower index stays."""
    if _owns_its_owner(group, groups):
        lists = table.reshape(-1, group.size)
        table = lists.sum(axis=0)
    highest_first = np.argsort(-table, axis=-1, kind='stable')
    kept = highest_first[..., :count]
    return np.sort(kept, axis=-1)


def _owns_its_owner(group: Group, groups: Groups) -> bool:
    """Whether this group and an earlier one own each other's lists."""
    for other in groups.values():
        if other is group:
            break
        if _owns_lists_of(group, other) and _owns_lists_of(other, group):
            return True
    return False


def _owns_lists_of(owner: Group, group: Group) -> bool:
    owners = resolve_each(group.lists)
    return owner.atom.resolved() in owners
