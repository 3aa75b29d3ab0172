"""Which names have an entry in the reference, and which public ones lack one."""

import re
from collections.abc import Iterable, Sequence

from docs.extensions import public_names

_TABLE = re.compile(r'^<!-- entries -->\n((?:\|.*\n)*)', re.MULTILINE)
_ROW = re.compile(r'\| (\[?)`([\w.]+)`(?:\]\(.*?\))? \| ?(.*?) ?\|')
REFERENCE = public_names.ROOT / 'docs' / 'reference'


def documented_names() -> list[str]:
    """The names that have an entry on a page of the reference."""
    names = []
    for page in sorted(REFERENCE.glob('*.md')):
        for table in _TABLE.findall(page.read_text()):
            names += rows(table.splitlines())
    return names


def rows(table: Sequence[str]) -> dict[str, str]:
    """The names in a table of entries; with what stands behind those of constants, which have no link to a source."""
    words = {}
    for line in table[2:]:
        row = _ROW.fullmatch(line)
        if row is None:
            raise ValueError(
                f'{line!r} is no row of a table of entries, such as "| `jaxpruner.prune` | |"'
            )
        has_link, name, text = row.groups()
        words[name] = '' if has_link else text
    return words


def names_without_entry(more_code: Iterable[str] = ()) -> list[str]:
    """Public names of objects that no page of the reference has under any of their names."""
    documented = set(documented_names())
    missing = []
    for _, aliases in public_names.public_names(more_code):
        if documented.isdisjoint(aliases):
            missing.append(aliases[0])
    return sorted(missing)
