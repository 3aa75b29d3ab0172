"""Names of primitives in tables of rules. A rule under a misspelt name would never be asked."""

import gc
import importlib
import pkgutil

import jax
import jax.extend.core

from jaxpruner.trace import rules

# Primitives that not every version of JAX has: the first version that has them, and the first that has them no more.
ALWAYS, NEVER = (0,), (99,)
OF_SOME_VERSIONS = {
    'call': (ALWAYS, (0, 11)),
    'closed_call': (ALWAYS, (0, 11)),
    'custom_vjp_call_jaxpr': (ALWAYS, (0, 6)),  # now custom_vjp_call
    'debug_print': ((0, 7), NEVER),  # before, Pallas had it alone
    'jit': ((0, 7), NEVER),  # once pjit
    'log2': ((0, 11), NEVER),  # once a quotient
    'mesh_cast': ((0, 5, 3), (0, 7)),  # now reshard
    'mulhi': ((0, 10), NEVER),
    'one_minus_square': ((0, 11), NEVER),  # in derivatives of tanh and others
    'pgather': (ALWAYS, (0, 9)),
    'pjit': (ALWAYS, (0, 7)),  # now jit
    'polynomial': ((0, 12), NEVER),  # once a scan
    'psum2': (ALWAYS, (0, 6)),  # now psum_invariant
    'psum_invariant': ((0, 6), NEVER),
    'pvary': ((0, 6), NEVER),
    'ragged_dot': (ALWAYS, (0, 5, 1)),  # now ragged_dot_general
    'ragged_dot_general': ((0, 5, 1), NEVER),
    'reshard': ((0, 5, 3), NEVER),
    'stack': ((0, 10), NEVER),  # once a concatenation
    'tile': ((0, 9), NEVER),  # once a concatenation
    'unstack': ((0, 10), NEVER),  # once slices
}


def primitives_of_jax():
    """The names of all primitives that this version of JAX has."""
    if not hasattr(jax, 'shard_map'):
        importlib.import_module('jax.experimental.shard_map')  # it has some of them
    primitive = jax.extend.core.Primitive
    return {each.name for each in gc.get_objects() if issubclass(type(each), primitive)}


def tables(known):
    """Module and name of each table of primitives -> its names: those of collections that mostly name primitives."""
    found = {}
    for package in ('oneshot', 'sparse', 'structure', 'trace'):
        path = importlib.import_module(f'jaxpruner.{package}').__path__
        for module in pkgutil.walk_packages(path, f'jaxpruner.{package}.'):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, dict | frozenset | list | set | tuple):
                    names = {entry for entry in value if isinstance(entry, str)}
                    if len(names & known) * 2 > len(value):
                        found[f'{module.name}.{name}'] = names
    return found


def test_names_in_tables_of_primitives_are_names_of_primitives():
    version = jax.__version_info__
    existing = primitives_of_jax()
    found = tables(existing | OF_SOME_VERSIONS.keys())
    assert found['jaxpruner.trace.rules.RULES'] == rules.RULES.keys()
    assert found['jaxpruner.trace.rules.SCATTERS'] == rules.SCATTERS
    named = set().union(*found.values())
    wrong = {table: names - existing - OF_SOME_VERSIONS.keys() for table, names in found.items()}
    assert {table: names for table, names in wrong.items() if names} == {}
    of_this_version = {
        name for name, (first, end) in OF_SOME_VERSIONS.items() if first <= version < end
    }
    assert of_this_version <= existing  # modules that another test loaded may have more
    assert OF_SOME_VERSIONS.keys() <= named
