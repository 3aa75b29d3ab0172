"""Which names of the package are public, so that each has an entry in the reference.

Public is what `jaxpruner` lists, and what its packages export and its published modules define. Public is also every
name that a document, a notebook, an integration or the list of the original's interface uses from any module, and every
name that a test imports from a published one.
"""

import ast
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = 'jaxpruner'

# Modules whose names people import from them, beside the packages.
PUBLISHED = """
    algorithms.global_pruners algorithms.pruners algorithms.sparse_trainers algorithms.ste api base_updater
    mask_calculator sparsity_distributions sparsity_schedules sparsity_types utils
""".split()
# What belongs to the command line has pages of its own.
_NOT_IN_THE_REFERENCE = ('cli',)

# An object, and all names under which it is public.
Aliases = tuple[Any, list[str]]


def published_modules() -> list[types.ModuleType]:
    """The packages, and the modules whose names people import from them."""
    package = importlib.import_module(PACKAGE)
    modules = [package]
    for info in pkgutil.walk_packages(package.__path__, f'{PACKAGE}.'):
        short = info.name.removeprefix(f'{PACKAGE}.')
        is_named = info.ispkg or short in PUBLISHED
        if is_named and short.partition('.')[0] not in _NOT_IN_THE_REFERENCE:
            modules.append(importlib.import_module(info.name))
    return modules


def _exported(module: types.ModuleType) -> Iterator[str]:
    """The names that a package shows, or that a published module defines."""
    if hasattr(module, '__all__'):
        yield from module.__all__
        return
    for name, value in vars(module).items():
        if name.startswith('_') or isinstance(value, types.ModuleType | bool):
            continue
        home = getattr(value, '__module__', None) or ''
        if inspect.isclass(value) or inspect.isfunction(value):
            is_package = hasattr(module, '__path__')
            if home == module.__name__ or (is_package and home.startswith(PACKAGE)):
                yield name
        elif name.isupper():
            yield name


def names_in_code(code: str) -> set[str]:
    """Dotted names below `jaxpruner` that a piece of Python uses, as they are imported or as attributes."""
    tree = ast.parse(code)
    modules = {}  # the name in the code -> the dotted name it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            for alias in node.names:
                modules[alias.asname or alias.name] = f'{node.module}.{alias.name}'
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    modules[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
    used = set(modules.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split('.')
            if first in modules and all(map(str.isidentifier, rest)):
                used.add('.'.join([modules[first], *rest]))
    return used


def _is_ours(module: str | None) -> bool:
    return (module or '').partition('.')[0] == PACKAGE


def python_blocks(document: pathlib.Path) -> str:
    """The Python of a document, as one program."""
    return '\n'.join(
        re.findall(r'^```python\n(.*?)^```', document.read_text(), re.MULTILINE | re.DOTALL)
    )


def _documents() -> Iterator[str]:
    """The Python that readers see: of documents, notebooks and integrations."""
    for document in [*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md')]:
        yield python_blocks(document)
    for pattern in ('docs/notebooks/*.py', 'examples/integrations/*.py'):
        for path in ROOT.glob(pattern):
            yield path.read_text()


def _interface() -> Iterator[str]:
    """The names of the original's interface."""
    for module, names in json.loads((ROOT / 'tests/reference/interface.json').read_text()).items():
        yield from (f'{module}.{name}' for name in names)


def resolve(dotted: str) -> tuple[Any, str] | None:
    """The function, class or constant that a dotted name means, with its module; `None` for modules and attributes."""
    parts = dotted.split('.')
    for end in range(len(parts) - 1, 0, -1):
        module_name, rest = '.'.join(parts[:end]), parts[end:]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue
        value = getattr(module, rest[0], None)
        if isinstance(value, types.ModuleType) or rest[0].startswith('_') or value is None:
            return None
        return value, f'{module.__name__}.{rest[0]}'
    return None


def _used_names() -> Iterator[str]:
    for code in _documents():
        yield from names_in_code(code)
    yield from _interface()
    published = {module.__name__ for module in published_modules()}
    for path in ROOT.glob('tests/**/*.py'):
        for dotted in names_in_code(path.read_text()):
            if dotted.rpartition('.')[0] in published:
                yield dotted


def public_names(more_code: Iterable[str] = ()) -> list[Aliases]:
    """Every public object once, with its names, shortest first.

    Args:
      more_code: programs whose imports count, too.
    """
    names = []
    for module in published_modules():
        names += [f'{module.__name__}.{name}' for name in _exported(module)]
    names += sorted(set(_used_names()))
    for code in more_code:
        names += sorted(names_in_code(code))
    groups: dict[object, Aliases] = {}
    for dotted in names:
        found = resolve(dotted)
        if found is None:
            continue
        value, name = found
        if name.removeprefix(f'{PACKAGE}.').partition('.')[0] in _NOT_IN_THE_REFERENCE:
            continue
        _, aliases = groups.setdefault(identity(value, name), (value, []))
        if name not in aliases:
            aliases.append(name)
    return [(value, sorted(aliases, key=len)) for value, aliases in groups.values()]


def identity(value: Any, name: str) -> object:
    """What tells an object from others: numbers and strings of equal value are told apart by their names."""
    has_identity = callable(value) or isinstance(value, dict | list)
    return id(value) if has_identity else name.rpartition('.')[2]
