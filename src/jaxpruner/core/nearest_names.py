"""What an error about an unknown name says: the names that look like it."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the known names that look like an unknown one, or else all, in the words of an error.

    >>> nearest('magnitud', ['magnitude', 'random'])
    "did you mean 'magnitude'?"
    """
    known = sorted(known)
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if similar:
        return f'did you mean {" or ".join(map(repr, similar))}?'
    return f'known are {", ".join(map(repr, known))}'
