"""Every public name of the original exists, takes its arguments in order and by name, and has its defaults.

What differs on purpose stands in `DIFFERENCES` and in docs/migrating.md.
"""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import pytest

from jaxpruner import api
from jaxpruner.sparsity_types import NByM

HERE = Path(__file__).parent
MODULES = json.loads((HERE / 'interface.json').read_text())
MIGRATING = (HERE.parents[1] / 'docs' / 'migrating.md').read_text()
EXTENSIONS = 'extensions (registered by name)'

# Parameter -> our default, and the words by which docs/migrating.md lists it.
DIFFERENCES = {
    ('ACDC', 'reset_optimizer'): ('None', '`reset_optimizer`'),
    ('IterativeNMPruning', 'sparsity_type'): (repr(NByM(2, 4)), '`IterativeNMPruning`'),
}


def value_of(module, name):
    """What stands under a name today, and what it is called."""
    if module == EXTENSIONS:
        registered = name.partition(' -> ')[0]
        return api.ALGORITHM_REGISTRY[registered]
    return getattr(importlib.import_module(module), name)


ENTRIES = [(module, name) for module, entries in MODULES.items() for name in entries]
CALLABLE = [entry for entry in ENTRIES if MODULES[entry[0]][entry[1]]['kind'] != 'constant']
CLASSES = [(module, name) for module, name in CALLABLE if 'methods' in MODULES[module][name]]
METHODS = [
    (module, name, method)
    for module, name in CLASSES
    for method in MODULES[module][name]['methods']
]


def parameters(module, name):
    entry = MODULES[module][name]
    return entry['parameters'] if 'parameters' in entry else entry['fields']


def named(expected):
    return [parameter for parameter, default in expected if default != 'VAR_KEYWORD']


def check_binding(signature, names, skipped=0):
    """The names bind by position in their order, and by keyword."""
    values = [object() for _ in names]
    receivers = [object()] * skipped
    by_position = signature.bind(*receivers, *values).arguments
    by_name = signature.bind(*receivers, **dict(zip(names, values, strict=True))).arguments
    expected = dict(zip(names, values, strict=True))
    for bound in (by_position, by_name):
        assert {name: bound[name] for name in names} == expected


def test_the_table_is_complete():
    assert len(MODULES) == 14
    assert len(ENTRIES) > 80
    assert len(METHODS) > 30


@pytest.mark.parametrize(('module', 'name'), ENTRIES)
def test_the_name_exists(module, name):
    value_of(module, name)


@pytest.mark.parametrize(('module', 'name'), CALLABLE)
def test_arguments_bind(module, name):
    check_binding(inspect.signature(value_of(module, name)), named(parameters(module, name)))


@pytest.mark.parametrize(('module', 'name', 'method'), METHODS)
def test_arguments_of_methods_bind(module, name, method):
    expected = MODULES[module][name]['methods'][method]
    signature = inspect.signature(getattr(value_of(module, name), method))
    check_binding(signature, named(expected), skipped=1)
    for parameter, default in expected:
        if default == 'VAR_KEYWORD':
            assert any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()), parameter


def described(default):
    """A default as the table writes it."""
    if default is inspect.Parameter.empty:
        return 'required'
    return 'function' if callable(default) else default


def equals(ours, theirs):
    return repr(ours) == theirs or ours == theirs


def defaults(module, name):
    """Rows of parameter, our default, that of the original; what is required there may have a default here."""
    signature = inspect.signature(value_of(module, name)).parameters
    table = dict(parameters(module, name))
    fields = getattr(value_of(module, name), '__dataclass_fields__', {})
    for parameter in named(parameters(module, name)):
        if table[parameter] == 'required':
            continue
        # What a constructor shows for a field may be a marker of `dataclasses`.
        field = fields.get(parameter)
        ours = signature[parameter].default if field is None else field.default
        assert field is None or field.default is not dataclasses.MISSING
        yield parameter, described(ours), table[parameter]


def short_name(name):
    return name.partition(' -> ')[2] or name


@pytest.mark.parametrize(('module', 'name'), CALLABLE)
def test_defaults_are_equal_or_listed(module, name):
    for parameter, ours, theirs in defaults(module, name):
        if (short_name(name), parameter) in DIFFERENCES:
            expected, words = DIFFERENCES[short_name(name), parameter]
            assert not equals(ours, theirs), f'{parameter} does not differ any more'
            assert repr(ours) == expected
            assert words in MIGRATING
        else:
            assert equals(ours, theirs), parameter


@pytest.mark.parametrize(('module', 'name', 'method'), METHODS)
def test_defaults_of_methods_are_equal(module, name, method):
    signature = inspect.signature(getattr(value_of(module, name), method)).parameters
    for parameter, theirs in MODULES[module][name]['methods'][method]:
        if theirs not in ('required', 'VAR_KEYWORD'):
            assert equals(described(signature[parameter].default), theirs), parameter


@pytest.mark.parametrize(('module', 'name'), CLASSES)
def test_named_tuples_unpack_into_the_fields_of_the_original(module, name):
    if MODULES[module][name]['kind'] == 'namedtuple':
        fields = named(parameters(module, name))
        assert list(value_of(module, name)._fields)[: len(fields)] == fields


def test_the_differences_are_in_the_table():
    rows = {
        (short_name(name), parameter)
        for module, name in CALLABLE
        for parameter, _ in parameters(module, name)
    }
    assert set(DIFFERENCES) <= rows
