"""The README as package indexes show it, where links into the repository lead nowhere: hatchling calls this file.

On GitHub's machines the address of the repository is known, and links become whole addresses. Elsewhere a link becomes
its words and its path, and a picture the words that describe it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINK = re.compile(r'(!?)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)')


def repository(environment: Mapping[str, str]) -> str | None:
    """Returns the address of the repository that is built, if a workflow of GitHub builds it."""
    server, name = environment.get('GITHUB_SERVER_URL'), environment.get('GITHUB_REPOSITORY')
    return f'{server}/{name}' if server and name else None


def long_description(readme: str, address: str | None, commit: str) -> str:
    """Returns the README with whole addresses in its links, or without links if there is no address."""

    def replaced(match: re.Match) -> str:
        is_picture, words, path = match.groups()
        if address:
            view = 'raw' if is_picture else 'blob'
            return f'{is_picture}[{words}]({address}/{view}/{commit}/{path})'
        return f'*{words}*' if is_picture else f'{words} (`{path}`)'

    return _LINK.sub(replaced, readme)


def get_metadata_hook() -> type:
    """Returns the hook; hatchling looks for a function of this name."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface  # tests do without it

    class LongDescription(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            readme = (Path(self.root) / 'README.md').read_text(encoding='utf-8')
            address = repository(os.environ)
            text = long_description(readme, address, os.environ.get('GITHUB_SHA', 'HEAD'))
            metadata['readme'] = {'content-type': 'text/markdown', 'text': text}

    return LongDescription
