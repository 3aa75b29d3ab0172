"""Entries of the reference as plain Markdown: each name with its signature and docstring, as code has them."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from docs.extensions import coverage, public_names, reference_entries


def entries(lines: Sequence[str]) -> str:
    """Makes the entries of public names; the lines are those of `reference_entries.entries`."""
    blocks = []
    for name, words in coverage.rows(lines).items():
        blocks += [f'### `{name}`', words or f'```python\n{_stub(name)}\n```']
    return '\n\n'.join(blocks)


def _stub(name: str) -> str:
    """The head and the docstring of a function or class, and of what a class has."""
    found = public_names.resolve(name)
    if found is None:
        raise ValueError(f'{name} has an entry in the reference, and is no public name')
    value, _ = found
    if not inspect.isclass(value):
        return _head_and_docstring(value, 'def')
    parts = [_head_and_docstring(value, 'class')]
    for member in reference_entries.described_members(value):
        parts += _member_stub(value, member)
    return '\n\n'.join(parts)


def _member_stub(cls: type, name: str) -> Iterator[str]:
    member = inspect.getattr_static(cls, name)
    kinds = {classmethod: '@classmethod\n', staticmethod: '@staticmethod\n'}
    decorator = kinds.get(type(member), '')
    if inspect.isfunction(member) or decorator:
        function = getattr(member, '__func__', member)
        text = decorator + _head_and_docstring(function, 'def')
    else:
        text = f'@property\ndef {name}(self):\n{_docstring(member)}'
    yield textwrap.indent(text, '    ')


def _head_and_docstring(value: Any, keyword: str) -> str:
    return f'{keyword} {value.__name__}{_signature(value)}:\n{_docstring(value)}'


def _signature(value: Any) -> str:
    try:
        signature = reference_entries.printable_signature(value)
    except ValueError:  # of a class that is made as one of Python's own, a float for example
        return ''
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    # Names of types do without their modules, which are often private.
    text = re.sub(r'\b(?:[a-z_]\w*\.)+(?=[A-Z])', '', str(signature))
    return text.replace('Ellipsis', '...')


def _docstring(value: object) -> str:
    words = inspect.cleandoc(getattr(value, '__doc__', None) or '')
    return textwrap.indent(f'"""{words}\n"""' if '\n' in words else f'"""{words}"""', '    ')
