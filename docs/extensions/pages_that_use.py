"""Which pages use a public name in their code, so that its entry can lead there."""

import functools
import pathlib
import re

from docs.extensions import blocks_of_code, public_names

MOST = 5  # pages that an entry names
_FOLDERS = (
    'how_to',
    'tutorials',
    'notebooks',
    'explanation',
    '.',
)  # pages that show how come first
_DOCS = public_names.ROOT / 'docs'


def sentence(name: str) -> str:
    """Returns the pages that use a name, as a line of reStructuredText; empty if none does."""
    found = public_names.resolve(name)
    if found is None:
        return ''
    pages = _pages().get(public_names.identity(*found), {})
    best = sorted(pages, key=pages.__getitem__)[:MOST]
    links = [f':doc:`/{page}`' for page in best]
    return f'Used in {", ".join(links)}.' if links else ''


@functools.cache
def _pages() -> dict[object, dict[str, tuple]]:
    """What tells a public object from others -> the pages that use it, and their ranks: lowest first."""
    users: dict[object, dict[str, tuple]] = {}
    for path in _documents():
        code = _code(path)
        place = path.relative_to(_DOCS)
        folder = _FOLDERS.index(place.parent.as_posix())
        names = public_names.names_in_code(code)
        for dotted in sorted(names):
            found = public_names.resolve(dotted)
            if found is None:
                continue
            times = len(re.findall(rf'\b{dotted.rpartition(".")[2]}\b', code))
            # Pages that use it most, and of these the ones that use little else.
            rank = (folder, -times, len(names), place.name)
            pages = users.setdefault(public_names.identity(*found), {})
            pages.setdefault(place.with_suffix('').as_posix(), rank)
    return users


def _documents() -> list[pathlib.Path]:
    """Pages and notebooks, but not the reference itself."""
    pages = [public_names.ROOT / name for name in blocks_of_code.documents()]
    pages = [page for page in pages if page.is_relative_to(_DOCS)]
    found = [*pages, *_DOCS.glob('notebooks/*.py')]
    return [page for page in found if page.parent.name != 'reference']


def _code(path: pathlib.Path) -> str:
    """The Python of a page, or of a notebook without its magics."""
    if path.suffix == '.py':
        return re.sub(r'^%.*$', '', path.read_text(), flags=re.MULTILINE)
    return public_names.python_blocks(path)
