"""Groups whose channels need not be the same in each trip of a scan, each expert, or each head.

Layers of a scan share the group of their hidden units: all have as many. But layer 3 may keep other units than layer 5,
since no operation ever compares units of different layers. So it is with the features of heads and the hidden units of
experts. Here is the rule: channels may be chosen apart for each index of an atom t if

- every value with the channels also has t, once, or stands in the body of the scan whose trips t counts, and
- no operation mixes different indices of t, and
- no contraction over t leaves the channels in its result, and
- no contraction of the channels has t on one side alone, since it compares the channels of different t then.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, drop
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.uses.bodies import ProgramPath

# The atoms of one part of an axis, without sums: `(a + b) * c` has the terms (a, c) and (b, c).
Term = tuple[Axis, ...]


class _Value(NamedTuple):
    """A value that has a group's channels.

    Attributes:
      terms: of each axis.
      trips: atoms of the scans in whose bodies it stands.
    """

    terms: Sequence[Sequence[Term]]
    trips: Sequence[Axis]

    def has_one_owner(self, atom: Axis, owner: Axis) -> bool:
        """Whether an owner stands exactly once beside each place of an atom."""
        counts = [_count_in_each(terms, owner) for terms in self.terms]
        for i, terms in enumerate(self.terms):
            in_other_axes = drop(counts, [i])
            for term in terms:
                if atom not in term:
                    continue
                if term.count(atom) > 1:  # two of them in one axis would need two owners
                    return False
                if None in in_other_axes:
                    return False
                beside = self.trips.count(owner) + term.count(owner)
                if beside + sum(filter(None, in_other_axes)) != 1:
                    return False
        return True


def _count_in_each(terms: Sequence[Term], owner: Axis) -> int | None:
    """How often each term of an axis has an atom; `None` where they differ."""
    counts = {term.count(owner) for term in terms}
    return counts.pop() if len(counts) == 1 else None


def owners_of_lists(
    traces: Sequence[Trace], removable: Iterable[Axis]
) -> dict[Axis, tuple[Axis, ...]]:
    """For each atom of a group the atoms of which each index may keep channels of its own, in all programs."""
    trips: set[Axis] = set()  # their order matters
    mixed: set[tuple[Axis, Axis]] = set()
    for trace in traces:
        trips |= _atoms_of(tuple(trace.trips.values()))
        mixed |= _mixed_pairs(trace)
    values: dict[Axis, list[_Value]] = {}
    for trace in traces:
        for atom, values_of_atom in _values_by_atom(trace, set(removable) - trips).items():
            values.setdefault(atom, []).extend(values_of_atom)
    owners: dict[Axis, tuple[Axis, ...]] = {}
    for atom, values_of_atom in values.items():
        kept = []
        for owner in _first_owners(values_of_atom[0], atom):
            if _may_own(owner, atom, values_of_atom) and (atom, owner) not in mixed:
                kept.append(owner)
        owners[atom] = tuple(kept)
    return owners


def _may_own(owner: Axis, atom: Axis, values: Iterable[_Value]) -> bool:
    """Whether all values with the channels have an owner beside them, whose indices never meet."""
    if owner.pin is not None and owner.pin.mixes:
        return False
    return all(value.has_one_owner(atom, owner) for value in values)


def _mixed_pairs(trace: Trace) -> set[tuple[Axis, Axis]]:
    """Pairs of channels and an atom of which a contraction lets different indices meet."""
    pairs = set()
    for contraction in trace.contractions:
        shared, summed, free = map(_atoms_of, contraction)
        in_result = (shared - summed) | free
        pairs.update(itertools.product(in_result, summed))
        pairs.update(itertools.product(shared, free))
    return pairs


def _atoms_of(axes: Axes) -> set[Axis]:
    return set(itertools.chain.from_iterable(map(atoms, axes)))


def _first_owners(value: _Value, atom: Axis) -> list[Axis]:
    found = list(value.trips)
    for terms in value.terms:
        for term in terms:
            found += term
    return [each for each in dict.fromkeys(found) if each is not atom and each.size > 1]


def _values_by_atom(trace: Trace, removable: set[Axis]) -> dict[Axis, list[_Value]]:
    values: dict[Axis, list[_Value]] = {}
    seen = set()

    def add(axes: Axes, trips: Sequence[Axis]) -> None:
        own_axes = [id(axis.resolved()) for axis in axes]
        key = tuple(own_axes), tuple(map(id, trips))
        if key in seen:
            return
        seen.add(key)
        own = _atoms_of(axes) & removable
        if not own:
            return
        value = _Value(list(map(terms_of, axes)), trips)
        for atom in own:
            values.setdefault(atom, []).append(value)

    for axes in (*trace.leaves, *trace.states):
        add(axes, ())
    for path, equation in trace.equations.items():
        trips = _trips(trace, path)
        for axes in (*equation.operands, *equation.results):
            add(axes, trips)
    return values


def _trips(trace: Trace, path: ProgramPath) -> tuple[Axis, ...]:
    """The atoms of the scans in whose bodies an equation stands."""
    trips = []
    for length in range(1, len(path) - 1):
        outer_path = path[:length]
        if outer_path in trace.trips:
            trips += atoms(trace.trips[outer_path])
    return tuple(trips)


def terms_of(axis: Axis) -> list[Term]:
    """The terms of an expression, in their order."""
    if axis.form == 'atom':
        return [(axis.resolved(),)]
    if axis.form == 'sum':
        found: list[Term] = []
        for part in axis.parts:
            found += terms_of(part)
        return found
    products: list[Term] = [()]
    for part in axis.parts:
        products = [before + term for before in products for term in terms_of(part)]
    return products
