"""What an error about an unknown name says: the names that look like it."""

import difflib
from collections.abc import Iterable, Sequence

_MOST_LISTED = 30  # names that a message lists, where none looks like the unknown one
_MOST_NEAREST = 3
# How much less alike than the best a name may be, as a ratio of difflib.
_MARGIN = 0.1


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the known names that look like an unknown one, or else all, in the words of an error.

    Where all are too many, the three that differ least are named.

    >>> nearest('magnitud', ['magnitude', 'random'])
    "did you mean 'magnitude'?"
    """
    known = sorted(known)
    similar = difflib.get_close_matches(name, known, n=_MOST_NEAREST, cutoff=0.5)
    if similar:
        least = _likeness(name, similar[0]) - _MARGIN
        nearest_names = [repr(other) for other in similar if _likeness(name, other) >= least]
        return f'did you mean {" or ".join(nearest_names)}?'
    if len(known) > _MOST_LISTED:
        least_different = difflib.get_close_matches(name, known, n=_MOST_NEAREST, cutoff=0.0)
        return f'the nearest of {len(known)} names are {", ".join(map(repr, least_different))}'
    return f'known are {", ".join(map(repr, known))}'


def closest(name: str, known: Sequence[str]) -> list[str]:
    """Lists the three known names that look most like an unknown one; the first three if none does.

    >>> closest('dense/kernl', ['bias', 'dense/kernel'])
    ['dense/kernel']
    """
    similar = difflib.get_close_matches(name, known, n=_MOST_NEAREST, cutoff=0.4)
    return similar or list(known[:_MOST_NEAREST])


def _likeness(name: str, other: str) -> float:
    """Computes the ratio that `get_close_matches` compares."""
    return difflib.SequenceMatcher(None, other, name).ratio()
