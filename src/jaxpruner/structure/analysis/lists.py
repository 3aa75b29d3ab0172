"""Groups whose channels may differ between the trips of a scan, between experts, or between heads.

Layers of a scan share the group of their hidden units, so all have the same number of units. But layer 3 may keep other
units than layer 5, since no operation compares units of different layers. The same holds for the features of heads and
the hidden units of experts. Each index of an atom t owns a list of channels of its own if

- every value with the channels also has t, once, or lies in the body of the scan whose trips t counts. A bias of the
  features alone, which all heads share, breaks this;
- no operation mixes different indices of t, as sorting the heads would;
- no contraction over t leaves the channels in its result, as the sum of all heads, feature by feature, would;
- no contraction of the channels has t in only one operand, as the product of the queries of many heads with the keys of
  one does: it pairs the features of different heads.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, atoms_of_values, drop, resolve_each
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.trace.program import ProgramPath

# The atoms of one part of an axis, without sums: `(a + b) * c` has the terms (a, c) and (b, c).
Term = tuple[Axis, ...]


class _Value(NamedTuple):
    """A value that has a group's channels.

    Attributes:
      terms: of each axis.
      trips: atoms of the scans around it.
    """

    terms: Sequence[Sequence[Term]]
    trips: Sequence[Axis]

    def has_one_owner(self, atom: Axis, owner: Axis) -> bool:
        """Whether each channel has exactly one index of an owner beside it.

        A channel lies in a term of one axis. Beside it are the scans around the value, the rest of that term, and one
        term of each other axis. Together they must have the owner once:

            trips.count(owner) + term.count(owner) + sum over the other axes of term.count(owner) = 1

        With heads h and features c, axes (h, c) and (h * c,) have one owner. Axes (h, h * c) have two. Axes (h + g, c)
        have one beside the first elements of axis 0 and none beside the others, which counts as none.
        """
        times_in_axes = [_times_in_each(terms, owner) for terms in self.terms]
        for i, terms in enumerate(self.terms):
            times_in_others = sum(drop(times_in_axes, [i]))
            for term in terms:
                if atom not in term:
                    continue
                if term.count(atom) > 1:  # two in one axis would need two owners
                    return False
                times = self.trips.count(owner) + term.count(owner) + times_in_others
                if times != 1:
                    return False
        return True


def _times_in_each(terms: Sequence[Term], owner: Axis) -> float:
    """How often each term of an axis has an atom; infinity if the terms differ, so that no sum with it is 1."""
    counts = {term.count(owner) for term in terms}
    return counts.pop() if len(counts) == 1 else math.inf


def owners_of_lists(
    traces: Sequence[Trace], removable: Iterable[Axis]
) -> dict[Axis, tuple[Axis, ...]]:
    """For each atom of a group the atoms that own its lists: each of their indices may keep channels of its own."""
    trips: set[Axis] = set()  # their order matters
    mixed: set[tuple[Axis, Axis]] = set()
    for trace in traces:
        trips |= _atoms_of(tuple(trace.trips.values()))
        mixed |= _mixed_pairs(trace)
    values: dict[Axis, list[_Value]] = {}
    candidates = set(removable) - trips
    for trace in traces:
        for atom, values_of_atom in _values_by_atom(trace, candidates).items():
            values.setdefault(atom, []).extend(values_of_atom)
    owners_of: dict[Axis, tuple[Axis, ...]] = {}
    for atom, values_of_atom in values.items():
        owners = []
        for owner in _possible_owners(values_of_atom[0], atom):
            is_mixed = (atom, owner) in mixed
            if not is_mixed and _may_own(owner, atom, values_of_atom):
                owners.append(owner)
        owners_of[atom] = tuple(owners)
    return owners_of


def _may_own(owner: Axis, atom: Axis, values: Iterable[_Value]) -> bool:
    """Whether all values with the channels have the owner beside them, and no operation mixes its indices."""
    if owner.pin is not None and owner.pin.mixes:
        return False
    return all(value.has_one_owner(atom, owner) for value in values)


def _mixed_pairs(trace: Trace) -> set[tuple[Axis, Axis]]:
    """Pairs of a channel's atom and another one whose indices a contraction mixes for that channel."""
    pairs = set()
    for contraction in trace.contractions:
        shared, summed, free = map(_atoms_of, contraction)
        in_result = (shared - summed) | free
        pairs.update(itertools.product(in_result, summed))
        pairs.update(itertools.product(shared, free))
    return pairs


def _atoms_of(axes: Axes) -> set[Axis]:
    return set(atoms_of_values([axes]))


def _possible_owners(value: _Value, atom: Axis) -> list[Axis]:
    """The other atoms of a value and of the scans around it."""
    beside = list(value.trips)
    for terms in value.terms:
        for term in terms:
            beside += term
    distinct = dict.fromkeys(beside)
    distinct.pop(atom, None)
    return [owner for owner in distinct if owner.size > 1]


def _values_by_atom(trace: Trace, removable: set[Axis]) -> dict[Axis, list[_Value]]:
    """For each group's atom the distinct values with its channels."""
    values: dict[Axis, list[_Value]] = {}
    for axes, trips in _distinct_values(trace):
        atoms_along = _atoms_of(axes) & removable
        if not atoms_along:
            continue
        terms = list(map(terms_of, axes))
        for atom in atoms_along:
            values.setdefault(atom, []).append(_Value(terms, trips))
    return values


def _distinct_values(trace: Trace) -> Iterable[tuple[Axes, Sequence[Axis]]]:
    """The axes of values, and the atoms of the scans around them, without duplicates."""
    values: dict[Any, tuple[Axes, Sequence[Axis]]] = {}

    def add(axes: Axes, trips: Sequence[Axis]) -> None:
        identities = map(id, (*resolve_each(axes), *trips))
        key = len(axes), *identities
        values.setdefault(key, (axes, trips))

    for axes in (*trace.leaves, *trace.states):
        add(axes, ())
    for path, equation in trace.equations.items():
        trips = _trips_around(trace, path)
        for axes in equation.values:
            add(axes, trips)
    return values.values()


def _trips_around(trace: Trace, path: ProgramPath) -> tuple[Axis, ...]:
    """The atoms of the scans around an equation."""
    trips = []
    for length in range(1, len(path) - 1):
        outer_path = path[:length]
        if outer_path in trace.trips:
            trips += atoms(trace.trips[outer_path])
    return tuple(trips)


def terms_of(axis: Axis) -> list[Term]:
    """The terms of an expression, in order."""
    if axis.form == 'atom':
        return [(axis.resolved(),)]
    terms_of_parts = map(terms_of, axis.parts)
    if axis.form == 'sum':
        return list(itertools.chain.from_iterable(terms_of_parts))
    terms = []
    for chosen in itertools.product(*terms_of_parts):  # one of each factor
        together = itertools.chain.from_iterable(chosen)
        terms.append(tuple(together))
    return terms
