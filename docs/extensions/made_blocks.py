"""Blocks of the pages that are made from the code: a fence with one of these names stands for what its function makes.

| fence | stands for |
|---|---|
| `command-help` | what the commands in it print |
| `extras` | the table of the extras that it describes |
| `errors` | the list of all messages of errors |

A table below a comment with one of these names is for those who read the page in the repository. `python -m
ci.reference_tables` writes it, and the site has something longer in its place:

| comment | the site has |
|---|---|
| `entries` | the entries of the names in the table, from their docstrings, with a list of them in front |
| `config-keys` | the table of all keys of a configuration |
| `algorithms` | the table of all algorithms that have a name in a configuration |
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs.extensions import (
    command_help,
    config_tables,
    error_messages,
    extras_table,
    reference_entries,
)

MAKERS = {
    'entries': reference_entries.entries,
    'config-keys': config_tables.key_table,
    'algorithms': config_tables.algorithm_table,
    'command-help': command_help.printed,
    'extras': extras_table.table,
    'errors': error_messages.page,
}
_TABLES = ('entries', 'config-keys', 'algorithms')
_FENCE = re.compile(
    rf'^```\{{({"|".join(MAKERS.keys() - set(_TABLES))})\}}\n(.*?)^```$', re.MULTILINE | re.DOTALL
)
TABLE = re.compile(rf'^<!-- ({"|".join(_TABLES)}) -->\n((?:\|.*\n)*)', re.MULTILINE)


# Files of the repository that a page shows, and those that are downloaded.
_SHOWN = re.compile(r'\]\(\.\./((?:\.\./)*)(CHANGELOG|CONTRIBUTING)\.md')
_DOWNLOADED = re.compile(r'\[([^]]+)\]\(((?:\.\./)+examples/[^)]+)\)')


def lead_links(text: str) -> str:
    """Returns a page whose links to files outside of the documents lead to pages, or download the file."""
    text = _SHOWN.sub(lambda match: f']({match[1]}{match[2].lower()}.md', text)
    return _DOWNLOADED.sub(r'{download}`\1 <\2>`', text)


def replace_blocks(text: str, makers: Mapping[str, Callable[[Sequence[str]], str]] = MAKERS) -> str:
    """Returns a page in which each of these blocks is replaced by what is made of its lines."""
    for block in (_FENCE, TABLE):
        text = block.sub(lambda match: makers[match[1]](match[2].splitlines()) + '\n', text)
    return text


def offer_download(text: str, name: str) -> str:
    """Returns a notebook in the percent format that offers itself, with its results, before its first code."""
    cell = f'# %% [markdown]\n# Download with results: {{nb-download}}`{name}.ipynb`'
    return text.replace('\n# %%\n', f'\n{cell}\n\n# %%\n', 1)


def _on_source_read(app: Any, docname: str, source: list[str]) -> None:
    del app
    folder, _, name = docname.rpartition('/')
    if folder == 'notebooks':
        source[0] = offer_download(source[0], name)
    source[0] = replace_blocks(lead_links(source[0]))


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect('source-read', _on_source_read)
    reference_entries.connect(app)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
