"""Each page as plain Markdown beside its HTML, and `llms.txt`, which lists them: for assistants and other programs.

What is made from the code stands in the text, notebooks have their results, links lead from one plain page to the next,
and a picture is the words that describe it. https://llmstxt.org describes the list.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docs.extensions import made_blocks, plain_entries, public_names

DOCS = public_names.ROOT / 'docs'
MAKERS = made_blocks.MAKERS | {'entries': plain_entries.entries}
# Files that are shown by pages of the site.
_SHOWN = {
    public_names.ROOT / 'CHANGELOG.md': DOCS / 'changelog.md',
    public_names.ROOT / 'CONTRIBUTING.md': DOCS / 'contributing.md',
}
_FENCE = re.compile(r'(^(`{3,})[^\n]*\n.*?^\2$)', re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r'^```\{([\w-]+)\} ?([^\n]*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_LINK = re.compile(r'(!?)\[([^\]]+)\]\(([^)\s]+)\)')
_ROLE = re.compile(r'\{(py:\w+|doc|download|ref|term)\}`([^`]*)`')
_GENERAL_INDEX = re.compile(
    r'^- \{ref\}`genindex`.*\n', re.MULTILINE
)  # there is none of plain pages
_ATTRIBUTES = re.compile(r'^\{[.#][\w -]+\}\n', re.MULTILINE)


def page_names(first: str = 'index') -> list[str]:
    """A page and those below it, in the order of the site, as paths below the documents without ending."""
    names: dict[str, None] = {}
    queue = [first]
    while queue:
        name = queue.pop(0)
        if name not in names:
            names[name] = None
            queue = [*listed_pages(name), *queue]
    return list(names)


def listed_pages(name: str) -> list[str]:
    """The pages that a page lists."""
    path = DOCS / f'{name}.md'
    if not path.exists():
        return []
    found = []
    for directive, _, body in _DIRECTIVE.findall(path.read_text()):
        if directive == 'toctree':
            lines = [line for line in body.splitlines() if line and not line.startswith(':')]
            found += [_relative(path.parent / line, DOCS) for line in lines]
    return found


def plain_page(name: str, read_notebook: Callable[[str], Any]) -> str:
    """Returns a page as plain Markdown.

    Args:
      name: of the page.
      read_notebook: returns the notebook of a name, with its results.
    """
    path = DOCS / f'{name}.md'
    if path.exists():
        text = made_blocks.replace_blocks(path.read_text(), MAKERS)
    else:
        path = DOCS / f'{name}.py'
        text = '\n\n'.join(_cells(read_notebook(name)))
    text = _DIRECTIVE.sub(lambda match: _directive(path, *match.groups()), text)
    text = _GENERAL_INDEX.sub('', _ATTRIBUTES.sub('', text))
    return _in_words(text, path, path.parent).strip() + '\n'


def _directive(path: Path, directive: str, argument: str, body: str) -> str:
    """What stands in place of a block that Sphinx knows."""
    if directive == 'toctree':
        name = _relative(path.with_suffix(''), DOCS)
        if ':hidden:' in body:
            return ''
        listed = [DOCS / f'{page}.md' for page in listed_pages(name)]
        return '\n'.join(f'- [{_title(page)}]({_relative(page, path.parent)})' for page in listed)
    if directive == 'include':
        included = path.parent / argument
        text = included.read_text().partition('\n')[2].strip()  # its title is that of the page
        return _in_words(text, included, path.parent)
    raise ValueError(f'{path}: there are no plain words for a block {{{directive}}}')


def _in_words(text: str, source: Path, folder: Path) -> str:
    """Replaces links, pictures and roles outside of code; links of a source get to be those of a folder."""
    parts = _FENCE.split(text)
    for number in range(0, len(parts), 3):  # between them a fence with everything, and its quotes
        words = _ROLE.sub(_role, parts[number])
        parts[number] = _LINK.sub(lambda match: _link(match, source, folder), words)
        if number + 2 < len(parts):
            parts[number + 2] = ''
    return ''.join(parts)


def _role(match: re.Match[str]) -> str:
    role, text = match.groups()
    words = text.partition(' <')[0].removeprefix('~')
    return f'`{words}`' if role.startswith('py:') else words


def _link(match: re.Match[str], source: Path, folder: Path) -> str:
    is_picture, words, target = match.groups()
    if is_picture:
        return f'*{words}*'
    if target.startswith('#') or '://' in target:
        return match[0]
    address, hash_sign, anchor = target.partition('#')
    path = Path(os.path.normpath(source.parent / address))
    path = _SHOWN.get(path, path)
    is_page = path.is_relative_to(DOCS) and path.suffix in ('.md', '.py')
    if is_page:
        return f'[{words}]({_relative(path.with_suffix(".md"), folder)}{hash_sign}{anchor})'
    return f'{words} (`{_relative(path, public_names.ROOT)}`)'


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _cells(notebook: Any) -> Iterator[str]:
    """The cells of a notebook: words, code, and what code has printed and drawn."""
    for cell in notebook.cells:
        if cell.cell_type == 'markdown':
            if '{nb-download}' not in cell.source:
                yield cell.source
            continue
        yield f'```python\n{cell.source}\n```'
        picture = cell.metadata.get('mystnb', {}).get('image', {}).get('alt', 'a picture')
        for output in cell.get('outputs', ()):
            data = output.get('data', {})
            text = output.get('text') or data.get('text/plain') or ''
            if 'image/png' in data:
                yield f'*{picture}*'
            elif text.strip():
                yield f'```text\n{text.rstrip()}\n```'


def index(pages: dict[str, str]) -> str:
    """Makes `llms.txt`: the library in a sentence, and each page with its first sentence, part by part."""
    lines = [f'# {_first_line(pages["index"])}', '', f'> {_first_sentence(pages["index"])}']
    parts = {name: listed_pages(name) for name in listed_pages('index')}
    lines += ['', '## Start here', '']
    lines += [_entry(name, pages) for name in ['index', *parts] if not parts.get(name)]
    for part, names in parts.items():
        if names:
            lines += ['', f'## {_first_line(pages[part])}', '']
            lines += [_entry(name, pages) for name in page_names(part)]
    return '\n'.join(lines) + '\n'


def _entry(name: str, pages: dict[str, str]) -> str:
    sentence = _first_sentence(pages[name])
    return f'- [{_first_line(pages[name])}]({name}.md)' + (f': {sentence}' if sentence else '')


def _title(page: Path) -> str:
    source = page if page.exists() else page.with_suffix('.py')
    titles = re.findall(r'^(?:# )?# (.+)$', source.read_text(), re.MULTILINE)
    return titles[0]


def _first_line(text: str) -> str:
    return text.partition('\n')[0].removeprefix('# ')


def _first_sentence(text: str) -> str:
    """The first sentence behind the title, empty where something else stands there."""
    for paragraph in text.split('\n\n')[1:4]:
        words = _LINK.sub(lambda match: match[2], ' '.join(paragraph.split()))
        sentence = re.match(r'[\w`*].*?[.?!:](?= |$)', words)
        is_list_of_definitions = '\n: ' in paragraph
        if sentence and not is_list_of_definitions:
            return sentence[0].rstrip(':')
    return ''


def _write(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != 'html':
        return
    import nbformat  # tests read notebooks without results

    executed = Path(app.outdir).parent / 'jupyter_execute'

    def read_notebook(name: str) -> Any:
        return nbformat.read(executed / f'{name}.ipynb', as_version=4)

    pages = {name: plain_page(name, read_notebook) for name in page_names()}
    for name, text in pages.items():
        Path(app.outdir, f'{name}.md').write_text(text)
    Path(app.outdir, 'llms.txt').write_text(index(pages))


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx: plain pages are written when the site is there."""
    app.connect('build-finished', _write)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
