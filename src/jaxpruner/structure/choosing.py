"""Chooses which channels stay: `ChannelGraph.choose`.

Settings are read for each group (`choice_settings`). Weights get scores (`leaf_scores`), channels get scores of them
(`channel_scores`). These say in which order channels go (`ranking`), and a budget how far that goes (`budgets`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot.batches import as_inputs, first_batch
from jaxpruner.structure import (
    budgets,
    channel_scores,
    choice_settings,
    costs,
    latency,
    ranking,
)
from jaxpruner.structure.axes import Axes, Axis, atoms
from jaxpruner.structure.choice_settings import Settings
from jaxpruner.structure.choices import Choice
from jaxpruner.structure.cut import Cut, Lists
from jaxpruner.structure.keeping import check_keep
from jaxpruner.structure.leaf_scores import Evidence, scores_of_leaves
from jaxpruner.structure.members import Group

Groups = Mapping[str, Group]
Leaves = Mapping[tree_lib.Path, Axes]
Tables = Mapping[str, np.ndarray]
Counts = Mapping[str, int]


def choose(graph: Any, params: tree_lib.PyTree, settings: Settings) -> Choice:
    """See `ChannelGraph.choose`."""
    _check_params(graph, params)
    cost = costs.cost_function(graph)
    inputs, batches = _inputs_and_batches(graph, settings)
    milliseconds = None
    if settings.budget is None:
        counts = choice_settings.named_counts(graph.groups, settings)
        cost(counts)  # refuses counts that are none
        remarks = {name: 'not named' for name in graph.groups if name not in counts}
        candidates = {name: graph.groups[name] for name in counts}
        _check_shared(graph, params, candidates)
        scorer = _scorer(graph, params, settings, batches)
        tables = {name: scorer.score(group, Cut({})) for name, group in candidates.items()}
    else:
        budget = budgets.Budget.parse(settings.budget)
        remarks = choice_settings.remarks_of(graph.groups, settings)
        candidates = _candidates(graph.groups, remarks)
        limits = choice_settings.limits_of_groups(candidates, settings)
        sets = choice_settings.equal_sets(candidates, _leaves(graph), settings.equal)
        _check_shared(graph, params, candidates)
        scorer = _scorer(graph, params, settings, batches)
        tables = {name: scorer.score(group, Cut({})) for name, group in candidates.items()}
        bundles = ranking.bundle_groups(sets, tables, limits, _leaves(graph))
        steps = ranking.Steps(bundles, settings.ranking)
        if budget.quantity == 'latency':
            seconds = latency.latency_function(graph, params, inputs)
            counts = budgets.meet_latency(budget, steps, seconds, settings.progress)
            milliseconds = 1e3 * seconds({}), 1e3 * seconds(counts)
        else:
            counts = budgets.meet(budget, steps, lambda now: getattr(cost(now), budget.quantity))
    _check_shards(graph, params, counts)
    keep, tables = _rank(candidates, tables, counts, scorer)
    sizes = {name: group.size for name, group in graph.groups.items()}
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


def _leaves(graph: Any) -> Leaves:
    return dict(zip(graph.trace.paths, graph.trace.leaves, strict=True))


def _candidates(groups: Groups, remarks: Mapping[str, str]) -> dict[str, Group]:
    candidates = {name: group for name, group in groups.items() if name not in remarks}
    if not candidates:
        words = ', '.join([f'{name} ({remark})' for name, remark in remarks.items()])
        raise ValueError(f'there is no group to choose from: {words or "the model has none"}')
    return candidates


def _scorer(
    graph: Any, params: tree_lib.PyTree, settings: Settings, batches: Iterable[Any] | None
) -> channel_scores.Scorer:
    evidence = Evidence(graph.model.apply_fn, settings.gradients, batches, settings.progress)
    scores = scores_of_leaves(settings.score, params, evidence)
    return channel_scores.Scorer(_leaves(graph), scores, settings.reduce, settings.normalise)


def _inputs_and_batches(
    graph: Any, settings: Settings
) -> tuple[tuple[Any, ...] | None, Iterable[Any] | None]:
    """Arguments of the model after the parameters, a state included: the first ones, and all; `None` without any."""
    examples = graph.model.examples
    if settings.batches is None:
        return examples, None if examples is None else [examples]
    first, batches = first_batch(settings.batches)
    if not graph.model.programs[0].has_state:
        return as_inputs(first), batches
    if examples is None:
        raise ValueError(
            'the model has a state, and the graph was made with its shapes; make the graph with arrays'
        )
    state = examples[0]
    return (state, *as_inputs(first)), ((state, *as_inputs(batch)) for batch in batches)


def _rank(
    groups: Groups, tables: Tables, counts: Counts, scorer: channel_scores.Scorer
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The indices that stay, and the scores that decide it.

    The first scores are those of the whole model. So a head counts for features that go, and a feature that all heads
    share for heads that go. Each group is ranked once more by what the others leave.
    """
    keep = {}
    for name, group in groups.items():
        if counts[name] < group.size:
            keep[name] = _highest(tables[name], group, counts[name], groups)
    tables = dict(tables)
    for name in keep:
        others = {other: indices for other, indices in keep.items() if other != name}
        cut = check_keep(groups, others, allow_inexact=True)
        tables[name] = scorer.score(groups[name], cut)
        keep[name] = _highest(tables[name], groups[name], counts[name], groups)
    return keep, tables


def _highest(table: np.ndarray, group: Group, count: int, groups: Groups) -> np.ndarray:
    """The indices of the highest scores; of equal ones the lower index stays."""
    if _owns_its_owner(group, groups):
        table = table.reshape(-1, group.size).sum(axis=0)
    order = np.argsort(-table, axis=-1, kind='stable')
    return np.sort(order[..., :count], axis=-1)


def _owns_its_owner(group: Group, groups: Groups) -> bool:
    """Whether the channels of an earlier group have lists for each channel of this one, and the other way round."""
    own = group.atom.resolved()
    owners = {owner.resolved() for owner in group.lists}
    for other in groups.values():
        if other is group:
            return False
        is_owned = own in [owner.resolved() for owner in other.lists]
        if is_owned and other.atom.resolved() in owners:
            return True
    return False


def _check_params(graph: Any, params: tree_lib.PyTree) -> None:
    """Refuses what has other leaves than the model."""
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    if list(paths) != list(graph.trace.paths):
        own = sorted(map(tree_lib.path_string, set(paths) ^ set(graph.trace.paths)))
        raise ValueError(
            f'params are those of another model than the graph: one of them alone has {own}'
        )
    for path, leaf, axes in zip(paths, leaves, graph.trace.leaves, strict=True):
        shape = tuple([axis.size for axis in axes])
        name = tree_lib.path_string(path)
        if np.shape(leaf) != shape:
            raise ValueError(f'{name} has shape {np.shape(leaf)}, and {shape} in the model')
        if isinstance(leaf, jax.ShapeDtypeStruct) or tree_lib.is_traced(leaf):
            raise TypeError(
                f'{name} has no values, which scores are made of; give arrays, outside of jit'
            )


def _check_shared(graph: Any, params: tree_lib.PyTree, candidates: Groups) -> None:
    """Refuses one array for two leaves that would be cut in different ways."""
    cut_atoms = {group.atom.resolved() for group in candidates.values()}
    first: dict[int, int] = {}
    for number, leaf in enumerate(jax.tree.leaves(params)):
        other = first.setdefault(id(leaf), number)
        axes, other_axes = graph.trace.leaves[number], graph.trace.leaves[other]
        own_atoms, other_atoms = _atoms_along(axes), _atoms_along(other_axes)
        if other != number and own_atoms != other_atoms and cut_atoms & {*own_atoms, *other_atoms}:
            names = [tree_lib.path_string(graph.trace.paths[each]) for each in (other, number)]
            raise ValueError(
                f'{names[0]} and {names[1]} are one array, and their channels are chosen apart; let the model read one '
                'leaf in both places, or copy the array (jax.tree.map(jnp.copy, params)) if they need not stay equal'
            )


def _atoms_along(axes: Axes) -> list[Axis]:
    found = []
    for axis in axes:
        found += atoms(axis)
    return found


def _check_shards(graph: Any, params: tree_lib.PyTree, counts: Counts) -> None:
    """Refuses sizes that the devices of an axis do not divide."""
    lists = {}
    for name, count in counts.items():
        lists[graph.groups[name].atom.resolved()] = Lists((), np.arange(count))
    cut = Cut(lists)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        sharding = getattr(leaf, 'sharding', None)
        if sharding is None or sharding.is_fully_replicated:
            continue
        parts = sharding.shard_shape(leaf.shape)
        for i, axis in enumerate(graph.trace.leaves[number]):
            devices = leaf.shape[i] // max(parts[i], 1)
            if cut.size(axis) != axis.size and cut.size(axis) % devices:
                path = graph.trace.paths[number]
                names = _names_along(graph.groups, path, i, counts)
                raise ValueError(
                    f'{tree_lib.path_string(path)} lies on {devices} devices along axis {i}, which do not divide the '
                    f'{cut.size(axis)} of {axis.size} that stay; take multiples, round_to={{{names}: …}}'
                )


def _names_along(groups: Groups, path: tree_lib.Path, axis: int, counts: Counts) -> str:
    """The groups along an axis of a leaf that get smaller."""
    names = []
    for name, group in groups.items():
        is_along = any(member.path == path and member.axis == axis for member in group.members)
        if is_along and counts.get(name, group.size) != group.size:
            names.append(repr(name))
    return ', '.join(names)
