"""Types of other libraries lead to their documents, by a table of addresses, so that the build needs no network."""

import importlib
from typing import Any

_PYTHON = 'https://docs.python.org/3/library/'
_NUMPY = 'https://numpy.org/doc/stable/reference/'
_OPTAX = 'https://optax.readthedocs.io/en/latest/api/transformations.html'

# The public name of a type -> the page that has it; the anchor on it is the name.
PAGES = {
    'collections.abc.Callable': f'{_PYTHON}collections.abc.html',
    'collections.abc.Iterable': f'{_PYTHON}collections.abc.html',
    'collections.abc.Iterator': f'{_PYTHON}collections.abc.html',
    'collections.abc.Mapping': f'{_PYTHON}collections.abc.html',
    'collections.abc.Sequence': f'{_PYTHON}collections.abc.html',
    'jax.Array': 'https://docs.jax.dev/en/latest/_autosummary/jax.Array.html',
    'numpy.dtype': f'{_NUMPY}generated/numpy.dtype.html',
    'numpy.ndarray': f'{_NUMPY}generated/numpy.ndarray.html',
    'optax.GradientTransformation': _OPTAX,
    'optax.GradientTransformationExtraArgs': _OPTAX,
    'pathlib.Path': f'{_PYTHON}pathlib.html',
    'rich.console.Group': 'https://rich.readthedocs.io/en/stable/reference/console.html',
}


def imported(dotted: str) -> Any:
    """Returns what a dotted name means, and `None` where it means nothing."""
    module, _, name = dotted.rpartition('.')
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def address(dotted: str) -> str | None:
    """Returns the address of a type, whichever module it is named by, or `None` where it is not in the table."""
    if dotted.partition('.')[0] not in {name.partition('.')[0] for name in PAGES}:
        return None
    value = imported(dotted)
    for name, page in PAGES.items():
        if value is not None and value is imported(name):
            return f'{page}#{name}'
    return None


def _resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    from docutils import nodes  # tests read the table without Sphinx

    del app, env
    if node.get('refdomain') != 'py':
        return None
    uri = address(node['reftarget'])
    if uri is None:
        return None
    return nodes.reference('', '', content, internal=False, refuri=uri)


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect('missing-reference', _resolve)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
