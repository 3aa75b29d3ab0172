"""Reads code out of the documents that define the interface, in the `seeds` folder under `JAXPRUNER_SHARED`."""

import ast
import os
import re
from pathlib import Path

import pytest

needs_documents = pytest.mark.skipif(
    'JAXPRUNER_SHARED' not in os.environ,
    reason='JAXPRUNER_SHARED does not name the folder that holds seeds/',
)

CELL_MARK = 'In [None]:'


def find(*phrases):
    """The text of the one document that holds all phrases; names of files carry no meaning."""
    folder = Path(os.environ['JAXPRUNER_SHARED']) / 'seeds'
    texts = [path.read_text() for path in sorted(folder.glob('*.txt'))]
    found = [text for text in texts if all(phrase in text for phrase in phrases)]
    assert len(found) == 1, f'{len(found)} of {len(texts)} documents in {folder} hold {phrases}'
    return found[0]


def cells(notebook):
    """The code cells of a notebook printed as text.

    Only the beginning of a cell is marked, and text follows its code: a cell is the longest prefix that is Python, once
    the lines for the shell (`!`) are gone.
    """
    return [_longest_code(part) for part in notebook.split(CELL_MARK)[1:]]


def _longest_code(text):
    lines = [line for line in text.splitlines() if not line.startswith('!')]
    for length in range(len(lines), 0, -1):
        code = '\n'.join(lines[:length])
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        return code
    return ''


def python_blocks(markdown):
    """The code between fences that are marked as Python."""
    return re.findall(r'^```python\n(.*?)^```', markdown, re.DOTALL | re.MULTILINE)
