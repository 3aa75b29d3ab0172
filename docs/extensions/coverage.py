"""Which names have an entry in the reference, and which public ones lack one."""

import re
from collections.abc import Iterable

from docs.extensions import public_names

_BLOCK = re.compile(r'^```\{entries\}\n(.*?)^```$', re.MULTILINE | re.DOTALL)
REFERENCE = public_names.ROOT / 'docs' / 'reference'


def documented_names() -> list[str]:
    """The names that have an entry on a page of the reference."""
    names = []
    for page in sorted(REFERENCE.glob('*.md')):
        for block in _BLOCK.findall(page.read_text()):
            names += [line.partition(':')[0] for line in block.splitlines()]
    return names


def names_without_entry(more_code: Iterable[str] = ()) -> list[str]:
    """Public names of objects that no page of the reference has under any of their names."""
    documented = set(documented_names())
    missing = []
    for _, aliases in public_names.public_names(more_code):
        if documented.isdisjoint(aliases):
            missing.append(aliases[0])
    return sorted(missing)
