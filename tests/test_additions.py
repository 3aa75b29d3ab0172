"""What CONTRIBUTING.md asks of an addition: each place that lists algorithms, types or formats names all of them."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest

import jaxpruner
from jaxpruner import BaseUpdater, SparsityType, algorithms, api

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = (ROOT / 'CONTRIBUTING.md').read_text()
PROSE = re.sub(r'```.*?```', '', CONTRIBUTING, flags=re.DOTALL)
PACKAGE = ROOT / 'src' / 'jaxpruner'
# Where the page says that its paths begin.
BEGINNINGS = (ROOT, ROOT / 'src', PACKAGE, *(path for path in PACKAGE.rglob('*') if path.is_dir()))
# Users make these by hand: a configuration cannot hold masks, and a base or a mixin needs a class.
WITHOUT_NAME = {'FixedMask', 'SteMixin', '_BaseUpdater'}


UPDATERS = {
    name: value
    for name, value in vars(algorithms).items()
    if inspect.isclass(value) and issubclass(value, BaseUpdater) and name not in WITHOUT_NAME
}
TYPES = {
    name
    for name, value in ((name, getattr(jaxpruner, name)) for name in dir(jaxpruner))
    if inspect.isclass(value) and issubclass(value, SparsityType) and value is not SparsityType
}


@pytest.mark.parametrize('path', sorted(set(re.findall(r'`([\w/]+(?:\.py|\.md|/))`', PROSE))))
def test_the_paths_of_the_page_lead_somewhere(path):
    assert any((beginning / path).exists() for beginning in BEGINNINGS)


def test_the_table_of_packages_has_the_layers_of_the_linter():
    section = CONTRIBUTING.split('## Where things are')[1].split('\n## ')[0]
    rows = []
    for cell in re.findall(r'^\| (`[^|]*) \|', section, re.MULTILINE):
        names = re.findall(r'`(\w+)(?:/|\.py)`', cell)
        rows.append(set(names))
    tools = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']
    layers = tools['importlinter']['contracts'][0]['layers']
    assert rows == [set(layer.split(' | ')) for layer in reversed(layers)]


@pytest.mark.parametrize('name', UPDATERS)
def test_an_algorithm_has_a_name_in_configurations(name):
    assert UPDATERS[name] in api.ALGORITHM_REGISTRY.values()


@pytest.mark.parametrize('name', sorted(TYPES))
def test_documents_name_each_sparsity_type(name):
    docs = ROOT / 'docs'
    assert f'`jaxpruner.{name}`' in (docs / 'reference' / 'sparsity_types.md').read_text()
    assert f'\n| `{name}(' in (docs / 'how_to' / 'choose_sparsity_types.md').read_text()
