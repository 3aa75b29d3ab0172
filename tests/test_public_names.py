"""Every public name is documented with an example, and stands where users of JaxPruner look for it."""

import importlib
import importlib.metadata
import inspect
import pkgutil
import pydoc
import re

import pytest

import jaxpruner

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(jaxpruner.__path__, prefix='jaxpruner.')
]


# Modules whose names people import from them, beside the packages.
PUBLISHED = """
    algorithms.global_pruners algorithms.pruners algorithms.sparse_trainers algorithms.ste api base_updater
    jax_pruning mask_calculator sparsity_distributions sparsity_schedules sparsity_types utils
""".split()


def is_exported(module, name, value):
    """Whether a package shows the name, or a published module defines it."""
    if name.startswith('_') or not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    if not value.__module__.startswith('jaxpruner'):
        return False
    if hasattr(module, '__path__'):
        return True
    if module.__name__.removeprefix('jaxpruner.') not in PUBLISHED:
        return False
    return name in getattr(module, '__all__', [name]) and value.__module__ == module.__name__


PUBLIC = {
    f'{module.__name__}.{name}': value
    for module in [*MODULES, jaxpruner]
    for name, value in vars(module).items()
    if is_exported(module, name, value)
}


@pytest.mark.parametrize('value', PUBLIC.values(), ids=PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(value):
    assert value.__doc__, 'no docstring'
    assert '>>>' in value.__doc__, 'no example'
    if inspect.isclass(value):
        for name, method in vars(value).items():
            inherited = any(name in vars(base) for base in value.__mro__[1:])
            inherited |= name in getattr(value, '__dataclass_fields__', ())
            if inspect.isfunction(method) and not name.startswith('_') and not inherited:
                assert method.__doc__, f'{name} has no docstring'


def test_a_star_import_gives_the_public_names_and_a_wrong_one_is_refused():
    found = {}
    exec('from jaxpruner import *', found)
    assert found['RigL'] is jaxpruner.RigL
    with pytest.raises(
        AttributeError, match="module 'jaxpruner' has no attribute 'MagnitudPruning'"
    ):
        _ = jaxpruner.MagnitudPruning


def test_the_overview_in_help_names_each_public_name_once():
    overview = jaxpruner.__doc__.partition('wrap an optax optimizer:')[2].partition('`help(')[0]
    names, modules = (
        re.findall(r'\w+', re.sub('^.*?:', '', part, flags=re.MULTILINE))
        for part in overview.split('Modules:')
    )
    public = [
        name
        for name, value in vars(jaxpruner).items()
        if not name.startswith('_') and not inspect.ismodule(value)
    ]
    assert sorted(names) == sorted(public)
    assert all(inspect.ismodule(getattr(jaxpruner, name)) for name in modules)
    assert overview.strip() in pydoc.plain(pydoc.render_doc(jaxpruner)).replace('\n    ', '\n')


def test_modules_that_documents_named_are_found_under_their_old_names():
    import jaxpruner.sparse_state
    import jaxpruner.tree
    from jaxpruner import tree

    assert jaxpruner.tree.map_with_missing is tree.map_with_missing
    assert jaxpruner.sparse_state.SparseState is jaxpruner.SparseState
    assert jaxpruner.utils.prng_key(8).tolist() == [0, 8]
