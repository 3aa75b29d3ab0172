"""Entries of the reference, which autodoc makes from docstrings, and where a name that is not documented leads."""

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from docs.extensions import coverage, pages_that_use, public_names


def entries(lines: Sequence[str]) -> str:
    """Makes the entries of public names, with a list of them in front.

    Args:
      lines: of the table that has these names.
    """
    words = coverage.rows(lines)
    documented = [f'   ~{name}' for name, text in words.items() if not text]
    made = ['```{eval-rst}', '.. autosummary::', '   :nosignatures:', '', *documented, '']
    for name, text in words.items():
        made += [*_entry(name, text), '', pages_that_use.sentence(name), '']
    return '\n'.join([*made, '```'])


def _entry(name: str, words: str) -> Iterator[str]:
    found = public_names.resolve(name)
    if found is None:
        raise ValueError(f'{name} has an entry in the reference, and is no public name')
    value, _ = found
    is_constant = not has_docstring(value)
    if is_constant and not words:
        raise ValueError(f'{name} is a constant: the table has to say what it is')
    if is_constant:
        yield f'.. py:data:: {name}'
        yield from ('', f'   {words}')
    elif inspect.isclass(value):
        yield f'.. autoclass:: {name}'
        members = ', '.join(described_members(value))
        if members:
            yield f'   :members: {members}'
    else:
        yield f'.. autofunction:: {name}'


def has_docstring(value: Any) -> bool:
    """Whether it is a class or function of the package, not a constant."""
    is_ours = value_module(value) == public_names.PACKAGE
    return is_ours and (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)))


def summary(value: Any) -> str:
    """The first paragraph of a docstring, as a cell of a table."""
    text = (inspect.getdoc(value) or '').partition('\n\n')[0]
    return ' '.join(text.split()).replace('|', r'\|')


def value_module(value: Any) -> str:
    """The package that a class or function comes from."""
    return (getattr(value, '__module__', None) or '').partition('.')[0]


def described_members(cls: type) -> list[str]:
    """Methods and properties with docstrings: those of the class, and of bases that have no entry of their own."""
    bases = cls.__mro__[1:]
    documented = [base for base in bases if id(base) in _objects_with_entries()]
    helpers = [base for base in bases if value_module(base) == public_names.PACKAGE]
    names = list(vars(cls))
    for helper in helpers:
        if not any(issubclass(base, helper) for base in documented):
            names += list(vars(helper))
    return [name for name in dict.fromkeys(names) if _is_described_member(cls, name)]


def _is_described_member(cls: type, name: str) -> bool:
    if name in getattr(cls, '__dataclass_fields__', {}):  # a field, whose default may be a function
        return False
    member = inspect.getattr_static(cls, name)
    is_method = inspect.isfunction(member) or isinstance(
        member, classmethod | property | staticmethod | functools.cached_property
    )
    return is_method and not name.startswith('_') and bool(member.__doc__)


@functools.cache
def _objects_with_entries() -> frozenset[int]:
    found = [public_names.resolve(name) for name in coverage.documented_names()]
    return frozenset(id(entry[0]) for entry in found if entry is not None)


def _signature(
    app: Any,
    what: str,
    name: str,
    value: Any,
    options: Any,
    signature: str | None,
    result: str | None,
) -> tuple[str, str] | None:
    """Writes the signature with `...` for defaults that are no Python when they are printed."""
    del app, name, options
    if what not in ('class', 'function') or not signature or '<' not in signature:
        return None
    described = printable_signature(value)
    from sphinx.util.inspect import stringify_signature  # tests make entries without Sphinx

    text = stringify_signature(described, show_return_annotation=False, unqualified_typehints=True)
    return text.replace('Ellipsis', '...'), result or ''


def printable_signature(value: Any) -> inspect.Signature:
    """The signature, with `...` for defaults that are no Python when they are printed."""
    described = inspect.signature(value)
    parameters = []
    for parameter in described.parameters.values():
        if '<' in repr(parameter.default) and parameter.default is not parameter.empty:
            parameter = parameter.replace(default=...)
        parameters.append(parameter)
    return described.replace(parameters=parameters)


def _typeset(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turns formulas between dollars, as notebooks have them, into those of reStructuredText."""
    del app, name, value, options
    if what == 'property' and lines:
        lines[0] = f': {lines[0]}'  # else napoleon takes what stands before a colon for its type
    text = '\n'.join(lines)
    text = re.sub(r'^( *)\$\$(.*?)\$\$$', r'\1.. math:: \2', text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r'\$([^$]+)\$', r':math:`\1`', text)
    lines[:] = text.split('\n')


def _resolve_alias(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Leads a name that stands for a documented object to the entry of that object."""
    if node.get('refdomain') != 'py':
        return None
    python = env.get_domain('py')
    module, target = node.get('py:module'), node['reftarget']
    for candidate in (target, f'{module}.{target}', f'{public_names.PACKAGE}.{target}'):
        entry = _entry_of(candidate)
        if entry is not None:
            return python.resolve_xref(
                env, node['refdoc'], app.builder, 'obj', entry, node, content
            )
    return None


def _entry_of(dotted: str) -> str | None:
    """The documented name of the object that a dotted name means, with the attribute that follows."""
    if not re.fullmatch(r'jaxpruner(\.\w+)+', dotted):
        return None
    found = public_names.resolve(dotted)
    if found is None:
        return None
    value, name = found
    rest = _attribute_path(dotted, name)
    key = public_names.identity(value, name)
    for documented in coverage.documented_names():
        other = public_names.resolve(documented)
        if other is not None and public_names.identity(*other) == key and documented != dotted:
            return documented + rest
    return None


def _attribute_path(dotted: str, name: str) -> str:
    last = name.rpartition('.')[2]
    return dotted[dotted.rindex(f'.{last}') + len(last) + 1 :]


def _without_links_back(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Removes the links from source to entries: Sphinx writes one name a module there, and ours have several."""
    del app, template, doctree
    if page.startswith('_modules/'):
        context['body'] = re.sub(r'<a class="viewcode-back"[^>]*>.*?</a>', '', context['body'])


def connect(app: Any) -> None:
    """Registers what autodoc and cross-references ask."""
    app.setup_extension('sphinx.ext.autodoc')
    app.connect('autodoc-process-signature', _signature)
    app.connect('autodoc-process-docstring', _typeset, priority=100)  # before napoleon
    app.connect('missing-reference', _resolve_alias)
    app.connect('html-page-context', _without_links_back)
