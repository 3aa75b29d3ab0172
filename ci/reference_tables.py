"""Writes the tables of docs/reference, which those read who look at the pages in the repository.

`python -m ci.reference_tables` brings them up to date with the docstrings; a test fails where they are not. The site
has something longer in their place: docs/extensions/made_blocks.py.
"""

import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path

from docs.extensions import config_tables, coverage, made_blocks, public_names, reference_entries


def filled(page: str) -> str:
    """Returns a page of the reference with its tables as they should be."""
    return made_blocks.TABLE.sub(
        lambda match: f'<!-- {match[1]} -->\n{_TABLES[match[1]](match[2].splitlines())}\n', page
    )


def _entries(lines: Sequence[str]) -> str:
    """Links each name to its source, with the first words of its docstring; what constants are stays as it is."""
    rows = ['| name | what it is |', '|---|---|']
    for name, words in coverage.rows(lines).items():
        found = public_names.resolve(name)
        if found is not None and reference_entries.has_docstring(found[0]):
            source = Path(inspect.getfile(inspect.unwrap(found[0])))
            link = Path(os.path.relpath(source, coverage.REFERENCE)).as_posix()
            rows.append(f'| [`{name}`]({link}) | {reference_entries.summary(found[0])} |')
        else:
            rows.append(f'| `{name}` | {words} |')
    return '\n'.join(rows)


def _algorithms(lines: Sequence[str]) -> str:
    return re.sub(r'\{py:obj\}`~([^`]*)`', r'`\1`', config_tables.algorithm_table(lines))


_TABLES = {
    'entries': _entries,
    'config-keys': config_tables.key_table,
    'algorithms': _algorithms,
}

if __name__ == '__main__':
    for path in coverage.REFERENCE.glob('*.md'):
        path.write_text(filled(path.read_text()))
