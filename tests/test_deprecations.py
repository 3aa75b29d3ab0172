"""Names of JAX in all files, of those too that no test runs here: this version of JAX has not deprecated them."""

import ast
import contextlib
import importlib
import warnings
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ('src', 'tests', 'examples', 'benchmarks', 'ci')
# Names that stand behind a question for newer ones.
FOR_OLDER_VERSIONS = {'jax.experimental.shard_map.shard_map'}
SHORT = {'jnp': 'jax.numpy', 'lax': 'jax.lax'}


def names_of_jax():
    """Each dotted name of JAX -> a file that uses it."""
    found = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob('*.py')):
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.Attribute):
                    names = [ast.unparse(node)]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [f'{node.module}.{alias.name}' for alias in node.names]
                for name in names:
                    first, *rest = name.split('.')
                    name = '.'.join([SHORT.get(first, first), *rest])
                    if name.startswith('jax.') and name.replace('.', '').isidentifier():
                        found.setdefault(name, file.relative_to(ROOT))
    return found


def deprecated(name):
    """What JAX says against a dotted name, also where it has taken it away; empty if nothing."""
    module, *attributes = name.split('.')
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        value = importlib.import_module(module)
        for attribute in attributes:
            module += f'.{attribute}'
            if not hasattr(value, attribute):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            try:
                value = getattr(value, attribute)
            except AttributeError as error:
                said += [str(error)] if 'deprecated' in str(error) else []
                break
    return said + [str(w.message) for w in caught if issubclass(w.category, DeprecationWarning)]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason='newer names are not there yet')
def test_no_name_of_jax_is_deprecated():
    names = names_of_jax()
    assert {'jax.numpy.ones', 'jax.lax.scan', 'jax.extend.core.Literal'} <= names.keys()
    said = {name: (str(file), deprecated(name)) for name, file in names.items()}
    wrong = {name: where for name, where in said.items() if where[1]}
    assert wrong.keys() <= FOR_OLDER_VERSIONS, wrong
