"""Pages as plain Markdown: nothing in them needs Sphinx, and the list of them is complete."""

import os
import re

import jupytext
import pytest

from docs.extensions import coverage, plain_markdown
from docs.extensions.plain_markdown import DOCS

# What a page holds that has no words in its source.
MADE = {
    'changelog': '## [Unreleased]',
    'contributing': '## Adding an algorithm',
    'installation': '| `plot` | plots and animations |',
    'reference/configurations': '| `update_freq` |',
    'reference/errors': '`{name}` stands for a value',
    'reference/index': '- [Errors](errors.md)',
    'notebooks/quick_start': '```python\nimport functools\n',
}


def read_source(name):
    return jupytext.read(DOCS / f'{name}.py')


@pytest.fixture(scope='module')
def pages():
    names = plain_markdown.page_names()
    return {name: plain_markdown.plain_page(name, read_source) for name in names}


def test_every_page_is_there(pages):
    sources = [path for path in DOCS.rglob('*.md') if path.is_file()]
    sources += (DOCS / 'notebooks').glob('*.py')
    expected = {path.relative_to(DOCS).with_suffix('').as_posix() for path in sources}
    assert pages.keys() == expected


def test_pages_are_plain(pages):
    for name, text in pages.items():
        assert re.match(r'# \S', text), name
        assert not re.search(r'^ *[`:]{3,}\{', text, re.MULTILINE), name
        assert not re.search(r'\{(?:py:\w+|doc|ref|term|download|nb-download)\}`', text), name
        assert ' object at 0x' not in text, name
        assert MADE.get(name, '') in text, name


def test_links_lead_to_plain_pages(pages):
    followed = 0
    for name, text in pages.items():
        words = re.sub(r'^```.*?^```', '', text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r'\]\(([^)#\s]+)', words):
            if '://' not in target:
                page = os.path.normpath(os.path.join(os.path.dirname(name), target))
                assert page.removesuffix('.md') in pages, f'{name}: {target}'
                followed += 1
    assert followed > 100


def test_every_entry_of_the_reference_has_its_docstring(pages):
    reference = ''.join(text for name, text in pages.items() if name.startswith('reference/'))
    for name in coverage.documented_names():
        assert f'### `{name}`\n' in reference
    assert 'def prune(params: ' in reference
    assert '    def calculate_scores(self, ' in reference
    assert '    @property\n' in reference
