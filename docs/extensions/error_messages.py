"""The messages of all errors that the package makes, read from its source: nothing is imported or run.

A message is what a call such as `ValueError(f'{key} must be …')` gets. Names of constants, of variables that are
assigned once and of functions that return words are replaced by the words. What is left becomes a placeholder:
`{key}` for a variable, `{a | b}` for one of two words, `{…}` for anything longer.
"""

import ast
import builtins
import dataclasses
import functools
import pathlib
import textwrap
import types
from collections.abc import Iterator, Sequence

from docs.extensions import coverage, public_names

SOURCE = public_names.ROOT / 'src' / public_names.PACKAGE
# Errors that no user sees: broken promises inside the package, and signals that it catches itself.
INTERNAL = frozenset(
    {
        'AssertionError',
        'OtherDifferenceError',
        '_NotElementwiseError',
        'UnknownWeightsError',
    }
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEEPEST = 4  # names that stand for names that stand for names


@dataclasses.dataclass(frozen=True)
class Message:
    """A message, and where it comes from.

    Attributes:
      error: the name of the error's class, or the expression that gives it.
      text: the words, with placeholders.
      module: the dotted name of the module.
      function: the qualified name of the function in it, empty outside of functions.
    """

    error: str
    text: str
    module: str
    function: str

    @property
    def package(self) -> str:
        """The package or module below `jaxpruner`."""
        return self.module.split('.')[1] if '.' in self.module else self.module


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What names mean at some place: constants and functions of the module, and the function around it."""

    constants: dict[str, ast.expr]
    functions: dict[str, _Function]
    function: _Function | None = None

    def meaning(self, name: str) -> ast.expr | None:
        """The expression that a name stands for, if it is assigned once."""
        if self.function is not None:
            arguments = [
                argument.arg
                for argument in ast.walk(self.function.args)
                if isinstance(argument, ast.arg)
            ]
            assigned = _assigned(self.function).get(name, [])
            if name in arguments or len(assigned) > 1:
                return None
            if assigned:
                return assigned[0]
        return self.constants.get(name)


@functools.cache
def messages() -> list[Message]:
    """Every message once for each function that it comes from, in the order of the source."""
    found: dict[Message, None] = {}
    for path in sorted(SOURCE.rglob('*.py')):
        found |= dict.fromkeys(_messages_of(path))
    return list(found)


def description(package: str) -> str:
    """The first paragraph of the docstring of a package or module."""
    folder = SOURCE if package == public_names.PACKAGE else SOURCE / package
    path = folder / '__init__.py' if folder.is_dir() else folder.with_suffix('.py')
    words = ast.get_docstring(ast.parse(path.read_text())) or ''
    return words.partition('\n\n')[0]


def _messages_of(path: pathlib.Path) -> Iterator[Message]:
    tree = _parsed(path)
    relative = path.relative_to(SOURCE.parent).with_suffix('')
    module = '.'.join(part for part in relative.parts if part != '__init__')
    scope = _Scope(_all_constants() | _constants(tree), _all_functions() | _functions(tree))
    for call, owners in _calls(tree):
        error = _error_name(call)
        if error is None or error in INTERNAL:
            continue
        around = next((owner for owner in reversed(owners) if isinstance(owner, _Function)), None)
        words = _words_of_call(call, dataclasses.replace(scope, function=around))
        for text in words:
            if _has_words(text):
                yield Message(error, text, module, '.'.join(owner.name for owner in owners))


def _calls(tree: ast.AST, owners: tuple = ()) -> Iterator[tuple[ast.Call, tuple]]:
    """All calls, each with the classes and functions around it; those that are raised by another name, too."""
    for node in ast.iter_child_nodes(tree):
        inside = (*owners, node) if isinstance(node, _Function | ast.ClassDef) else owners
        if isinstance(node, ast.Call):
            yield node, owners
        yield from _calls(node, inside)


def _error_name(call: ast.Call) -> str | None:
    """The class of the error that a call makes; `None` if it makes no error."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, 'id', '')
    if name in _error_classes():
        return name
    is_raised_by_another_name = id(call) in _raised_calls()
    if is_raised_by_another_name and name not in _all_functions():
        return ast.unparse(call.func)
    return None


def _words_of_call(call: ast.Call, scope: _Scope) -> list[str]:
    """The last argument that holds words; the words that a function returns, if it is called for them."""
    for argument in reversed(call.args):
        if isinstance(argument, ast.Call):
            texts = _returned_words(argument, scope, 0)
            if texts:
                return texts
        text = _words(argument, scope)
        if _has_words(text):
            return [text]
    return []


def _words(node: ast.expr, scope: _Scope, depth: int = 0) -> str:
    """An expression as text with placeholders."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=int(number)) if depth > 0:
            return f'{number}'
        case ast.JoinedStr(values=values):
            return ''.join(_words(value, scope, depth) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            text = _words(left, scope, depth) + _words(right, scope, depth)
            if _has_words(text):
                return text
        case ast.FormattedValue(value=value):
            return _words(value, scope, depth)
        case ast.IfExp(body=body, orelse=orelse):
            return _either([_words(body, scope, depth), _words(orelse, scope, depth)])
        case ast.Name(id=name) if depth < _DEEPEST:
            meaning = scope.meaning(name)
            text = '' if meaning is None else _words(meaning, scope, depth + 1)
            return text if _has_words(text) or text.isdigit() else f'{{{name}}}'
        case ast.Attribute(attr=name) if name.isupper() and name in scope.constants:
            return _words(scope.constants[name], scope, depth + 1)
        case ast.Call() if depth < _DEEPEST:
            texts = _returned_words(node, scope, depth + 1)
            if texts and all(map(_has_words, texts)):
                return _either(texts)
    return f'{{{_placeholder(node)}}}'


def _returned_words(call: ast.Call, scope: _Scope, depth: int) -> list[str]:
    """What a call of a function of the package returns: the words of each of its returns."""
    called = call.func
    is_method = isinstance(called, ast.Attribute) and _last_name(called.value) not in _imported()
    function = scope.functions.get(_last_name(called))
    if is_method or function is None:
        return []
    inside = dataclasses.replace(scope, function=function)
    return [_words(value, inside, depth) for value in _returned(function)]


def _either(texts: list[str]) -> str:
    """One of several texts."""
    if not all(map(_has_words, texts)):
        return '{…}'
    return texts[0] if len(texts) == 1 else '{' + ' | '.join(texts) + '}'


def _placeholder(node: ast.expr) -> str:
    """The name of the variable, attribute or key that an expression is, or the only one that it is about."""
    match node:
        case ast.Attribute(value=ast.Call(func=ast.Name(id='type')) as call, attr='__name__'):
            return f'type of {_placeholder(call.args[0])}'
        case ast.Attribute(value=value, attr='__name__'):
            return _placeholder(value)
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    names = {name for name in names - _imported() if not hasattr(builtins, name)}
    return names.pop() if len(names) == 1 else '…'


def _has_words(text: str) -> bool:
    """Whether anything but placeholders is in a text."""
    depth = 0
    for character in text:
        depth += {'{': 1, '}': -1}.get(character, 0)
        if depth == 0 and character.isalpha():
            return True
    return '|' in text


# What stands in the source.


@functools.cache
def _parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    return {name: values[0] for name, values in _assigned(tree).items() if len(values) == 1}


@functools.cache
def _assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """What names are assigned directly in a module, or anywhere in a function."""
    nodes = ast.iter_child_nodes(tree) if isinstance(tree, ast.Module) else ast.walk(tree)
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(node.value)
    return values


def _functions(tree: ast.Module) -> dict[str, _Function]:
    return {node.name: node for node in tree.body if isinstance(node, _Function)}


def _returned(function: _Function) -> list[ast.expr]:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return [node.value for node in returns if node.value is not None]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')


@functools.cache
def _all_constants() -> dict[str, ast.expr]:
    """Public constants of all modules: those that others may name."""
    found = {}
    for path in sorted(SOURCE.rglob('*.py')):
        found |= {
            name: value for name, value in _constants(_parsed(path)).items() if name[0] != '_'
        }
    return found


@functools.cache
def _all_functions() -> dict[str, _Function]:
    found = {}
    for path in sorted(SOURCE.rglob('*.py')):
        found |= _functions(_parsed(path))
    return found


@functools.cache
def _error_classes() -> frozenset[str]:
    """Names of errors: Python's, and those that the package defines."""
    names = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and not issubclass(value, Warning)
    }
    for path in SOURCE.rglob('*.py'):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef) and not names.isdisjoint(map(_last_name, node.bases)):
                names.add(node.name)
    return frozenset(names)


@functools.cache
def _raised_calls() -> frozenset[int]:
    """Calls that stand behind `raise`."""
    found = set()
    for path in SOURCE.rglob('*.py'):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.add(id(node.exc))
    return frozenset(found)


@functools.cache
def _imported() -> frozenset[str]:
    """Names that modules import."""
    found = set()
    for path in SOURCE.rglob('*.py'):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name).partition('.')[0] for alias in node.names}
    return frozenset(found)


# The page.


def page(lines: Sequence[str] = ()) -> str:
    """Makes the list of all messages, package by package; the lines of the block are not used."""
    del lines
    packages: dict[str, list[Message]] = {}
    for message in messages():
        packages.setdefault(message.package, []).append(message)
    blocks = []
    for package in sorted(packages):
        blocks += [f'## `{package}`', description(package)]
        for (error, text), owners in _grouped(packages[package]).items():
            blocks += [
                f'{{.message}}\n```text\n{text}\n```',
                f'`{error}`, from {", ".join(owners)}.',
            ]
    return '\n\n'.join(blocks)


def _grouped(found: list[Message]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for message in found:
        owners = groups.setdefault((message.error, textwrap.dedent(message.text)), [])
        owners.append(_origin(message))
    return groups


def _origin(message: Message) -> str:
    """The function that a message comes from, as a link if it has an entry in the reference."""
    place = '.'.join(filter(None, [message.module, message.function]))
    words = place.removeprefix(f'{public_names.PACKAGE}.')
    for end in range(place.count('.'), 0, -1):
        entry = _entries().get('.'.join(place.split('.')[: end + 1]))
        if entry is not None:
            return f'{{py:obj}}`{words} <{entry}>`'
    return f'`{words}`'


@functools.cache
def _entries() -> dict[str, str]:
    """Where functions and classes with an entry are defined, and the names of their entries."""
    entries = {}
    for name in coverage.documented_names():
        found = public_names.resolve(name)
        value = None if found is None else found[0]
        if isinstance(value, type | types.FunctionType):
            entries[f'{value.__module__}.{value.__qualname__}'] = name
    return entries
