"""The table of extras, which a page describes and pyproject.toml defines."""

import tomllib
from collections.abc import Sequence

from docs.extensions import public_names

# What users of the library have no use for.
DEVELOPERS = frozenset({'all', 'dev', 'docs', 'integrations', 'lint', 'test'})


def extras() -> dict[str, list[str]]:
    """What each extra installs."""
    text = (public_names.ROOT / 'pyproject.toml').read_text()
    return tomllib.loads(text)['project']['optional-dependencies']


def table(lines: Sequence[str]) -> str:
    """Makes the table of lines `extra: what it is for`; each extra for users has one."""
    described = dict(line.split(': ', 1) for line in lines)
    wanted = extras().keys() - DEVELOPERS
    if described.keys() != wanted:
        differing = ', '.join(sorted(described.keys() ^ wanted))
        raise ValueError(
            f'the page of installation and pyproject.toml differ in the extras {differing}'
        )
    rows = ['| extra | is for | installs |', '|---|---|---|']
    for name, words in described.items():
        packages = ', '.join(f'`{requirement}`' for requirement in extras()[name])
        rows.append(f'| `{name}` | {words} | {packages} |')
    return '\n'.join(rows)
