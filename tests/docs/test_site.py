"""What can be checked of the site without Sphinx: names have entries, pages are reached, blocks can be made."""

import pathlib
import re

import pytest

import ci.reference_tables
from docs.extensions import (
    command_help,
    config_tables,
    coverage,
    extras_table,
    public_names,
)
from helpers import seed_documents
from jaxpruner.cli.main import commands

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / 'docs'


def test_every_public_name_has_an_entry():
    """A name that is missing goes into a block of entries on a page of docs/reference."""
    assert coverage.names_without_entry() == []


@seed_documents.needs_documents
def test_every_name_in_the_original_documents_has_an_entry():
    """Their notebook is one program; one of its cells that are no Python imports the library."""
    cells = seed_documents.cells(seed_documents.find('# JaxPruner Deep Dive'))
    program = '\n'.join(['import jaxpruner', *cells])
    assert 'jaxpruner.BaseUpdater' in public_names.names_in_code(program)
    assert coverage.names_without_entry([program]) == []


def test_names_without_entry_are_found():
    programs = [
        'from jaxpruner.tree import flatten_with_paths',
        'from jaxpruner import sparse_state as p\np.pack_leaf',  # there is no such name
        'import jaxpruner\njaxpruner.progress.progress_bar()',
        'from jaxpruner import seeds\nseeds.prng_key(1)',  # it is utils.prng_key
    ]
    expected = {'jaxpruner.tree.flatten_with_paths', 'jaxpruner.progress.progress_bar'}
    assert set(coverage.names_without_entry(programs)) == expected


def test_no_object_has_two_entries():
    documented = coverage.documented_names()
    assert len(documented) > 150
    identities = {}
    for name in documented:
        found = public_names.resolve(name)
        assert found is not None, name
        other = identities.setdefault(public_names.identity(*found), name)
        assert other == name


def test_tables_in_the_repository_are_up_to_date():
    for page in coverage.REFERENCE.glob('*.md'):
        made = ci.reference_tables.filled(page.read_text())
        assert made == page.read_text(), f'{page}; run: python -m ci.reference_tables'


def test_every_key_has_a_meaning_and_every_meaning_a_key():
    meanings = config_tables.meanings()
    keys = config_tables.all_keys()
    for key in keys:
        assert meanings.get(key), f'{key}: no docstring describes it'
        assert f'| `{key}` |' in config_tables.key_table()
    described = config_tables.described(config_tables.api.create_updater_from_config)
    assert described.keys() <= set(keys)
    assert len(described) >= 10


def test_the_table_of_keys_says_who_uses_them():
    rows = dict(re.findall(r'^\| `(\w+)` \| (.*) \|$', config_tables.key_table(), re.MULTILINE))
    assert rows['dist_type'].endswith('*Not used by `global_magnitude`, `global_saliency`.*')
    assert '*Used by `set`, `rigl`' in rows['drop_fraction']
    for key in ('filter_fn', 'custom_sparsity_map', 'power', 'update_freq'):
        assert 'sed by `' not in rows[key], key


def test_every_command_is_printed():
    page = (DOCS / 'reference' / 'command_line.md').read_text()
    assert re.findall(r'^jaxpruner (\w+) --help$', page, re.MULTILINE) == list(commands())
    assert '--sparsity' in command_help.printed(['jaxpruner prune --help'])
    with pytest.raises(ValueError, match='jaxpruner table out'):
        command_help.printed(['jaxpruner table out'])


def test_every_extra_is_described():
    names = extras_table.extras().keys() - extras_table.DEVELOPERS
    lines = [f'{name}: words' for name in names]
    assert extras_table.table(lines).count('words') == len(names)
    with pytest.raises(ValueError, match='plot'):
        extras_table.table([line for line in lines if not line.startswith('plot')])
