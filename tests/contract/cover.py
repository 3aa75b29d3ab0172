"""All-pairs covers: few cases in which every two values of two dimensions meet.

Most defects of combinations show with two of their parts already, so that a cover finds them with hundreds of cases
where the full product has tens of thousands. The generator is greedy and deterministic.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
Allowed = Callable[[Combination], bool]


def pairs_of(combination: Combination) -> set[tuple]:
    """Every two of its (dimension, value) entries."""
    return set(itertools.combinations(combination.items(), 2))


def all_pairs(dimensions: Mapping[str, Sequence[Any]], allowed: Allowed) -> list[Combination]:
    """Combinations in which each pair of values occurs that occurs in any allowed combination.

    Args:
      dimensions: the values of each dimension.
      allowed: whether a combination, complete or not yet, may be used. Put the dimension that restricts the others
        first, so that dead ends are found early.
    """
    uncovered = dict.fromkeys(
        ((a, value_a), (b, value_b))
        for a, b in itertools.combinations(dimensions, 2)
        for value_a, value_b in itertools.product(dimensions[a], dimensions[b])
    )
    used: Counter = Counter()
    cover = []
    while uncovered:
        pair = next(iter(uncovered))
        combination = _completed(dict(pair), dimensions, allowed, uncovered, used)
        if combination is None:
            del uncovered[pair]  # no allowed combination holds it
            continue
        for covered in pairs_of(combination):
            uncovered.pop(covered, None)
        used.update(combination.items())
        cover.append(combination)
    return cover


def _completed(partial, dimensions, allowed, uncovered, used) -> Combination | None:
    """The partial combination filled up with the values that cover most, by backtracking; None if there is none."""
    if not allowed(partial):
        return None
    missing = next((name for name in dimensions if name not in partial), None)
    if missing is None:
        return {name: partial[name] for name in dimensions}

    def worth(value):
        extended = {name: value if name == missing else partial.get(name) for name in dimensions}
        gained = sum(pair in uncovered for pair in pairs_of(extended) if (missing, value) in pair)
        return -gained, used[missing, value]

    for value in sorted(dimensions[missing], key=worth):
        combination = _completed({**partial, missing: value}, dimensions, allowed, uncovered, used)
        if combination is not None:
            return combination
    return None


def each_once(
    cases: Sequence[Combination], keys: Callable[[Combination], set]
) -> list[Combination]:
    """The cases, in order, that show a key which none before them has: a smaller cover out of a larger one."""
    seen: set = set()
    chosen = []
    for case in cases:
        if not keys(case) <= seen:
            seen |= keys(case)
            chosen.append(case)
    return chosen
