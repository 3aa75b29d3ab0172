"""Blocks of code in the documents: which are run, how, and which say why they are not."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from docs.extensions import public_names

# A block that is not run has its reason in a comment above.
_BLOCK = re.compile(
    r'^(?:<!-- not run: (.*?) -->\n)?```(\S*)\n(.*?)^```\n(\n(?=```text\n))?',
    re.MULTILINE | re.DOTALL,
)
MOST_NOT_RUN = 5


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
      document: its path below the repository.
      label: the language that the fence names.
      code: what is in it.
      output: what it prints, if that stands beneath, in a block labelled `text`.
      why_not_run: the reason.
    """

    document: str
    label: str
    code: str
    output: str | None = None
    why_not_run: str | None = None


def documents() -> list[str]:
    """The documents, as paths below the repository."""
    root = public_names.ROOT
    paths = [*root.glob('*.md'), *root.glob('docs/**/*.md')]
    return sorted(path.relative_to(root).as_posix() for path in paths)


def blocks(document: str) -> list[Block]:
    """The blocks of a document in their order; outputs belong to the blocks above them."""
    return list(read(document, (public_names.ROOT / document).read_text()))


def read(document: str, text: str) -> Iterator[Block]:
    """Reads the blocks of a text."""
    found = list(_BLOCK.finditer(text))
    is_output = False
    for position, match in enumerate(found):
        reason, label, code, has_output = match.groups()
        is_directive = label.startswith('{')  # these are made by the build
        if not is_output and not is_directive:
            output = found[position + 1][3] if has_output else None
            yield Block(document, label, code, output, reason)
        is_output = bool(has_output)


def not_run() -> list[Block]:
    """The blocks that give a reason why they are not run."""
    return [block for name in documents() for block in blocks(name) if block.why_not_run]


def _report(app: Any) -> None:
    from sphinx.util import logging  # tests read blocks without Sphinx

    del app
    excused = not_run()
    names = ', '.join(sorted({pathlib.PurePath(block.document).name for block in excused}))
    logging.getLogger(__name__).info(f'{len(excused)} blocks of code are not run, in {names}')


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx: each build says how many blocks are not run."""
    app.connect('builder-inited', _report)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
