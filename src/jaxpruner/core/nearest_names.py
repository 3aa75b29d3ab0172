"""What an error about an unknown name says: the names that look like it."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Words for an error about an unknown name: the known names that look like it.

    >>> nearest('magnitud', ['magnitude', 'random'])
    "did you mean 'magnitude'?"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f'did you mean {" or ".join(repr(word) for word in near)}?'
    return f'known are {", ".join(repr(word) for word in known)}'
