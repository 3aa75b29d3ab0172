"""The first page: its numbers were measured, its versions are tested, its links work on package indexes, too."""

import csv
import re
import tomllib
from pathlib import Path

import pytest

import ci.long_description

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / 'README.md').read_text()
WORDS = ' '.join(README.split())
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
PAIR = r'[\d.]+ \([\d.–]+\)'  # a median with its quartiles


def row(text, beginning):
    """The cells of the row of a table that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f'| {beginning}')]
    return [cell.strip() for cell in line.strip('|').split('|')]


@pytest.mark.parametrize(
    ('beginning', 'claim'),
    [
        ('overhead of a training step', 'An in-graph step costs about as much'),
        ('selecting the largest of 10^6', 'A mask of 10^6 float32 weights'),
    ],
)
def test_times_are_those_of_the_page_on_performance(beginning, claim):
    _, shown, command = row(README, beginning)
    _, measured, same_command = row((ROOT / 'docs' / 'performance.md').read_text(), claim)
    assert re.findall(PAIR, shown) == re.findall(PAIR, measured) != []
    assert command == same_command


def test_accuracies_are_those_that_the_picture_shows():
    with (ROOT / 'docs' / 'images' / 'first_picture.csv').open() as file:
        cells = {
            (cell['algorithm'], float(cell['sparsity'])): cell for cell in csv.DictReader(file)
        }
    shown = {}
    for name, sparsity in {'magnitude': 0.9, 'dense': 0.0}.items():
        cell = cells[name.replace('dense', 'no_prune'), sparsity]
        mean, deviation = 100 * float(cell['mean']), 100 * float(cell['std'])
        shown[name] = f'{name} {mean:.2f} ± {deviation:.2f}'
        assert f'{cell["n"]} seeds' in row(README, 'accuracy')[1]
    assert ', '.join(shown.values()) in row(README, 'accuracy')[1]


def test_versions_are_those_of_the_package():
    pythons = [text.rpartition(' ')[2] for text in PROJECT['classifiers'] if ':: 3.' in text]
    assert f'Python {pythons[0]} to {pythons[-1]}' in WORDS
    requirements = [*PROJECT['dependencies'], *PROJECT['optional-dependencies']['flax']]
    bounds = dict(text.split('>=') for text in requirements)
    names = f'JAX {bounds["jax"]} and optax {bounds["optax"]} or newer'
    assert f'{names}; for Flax models, flax {bounds["flax"]} or newer' in WORDS


@pytest.mark.parametrize(
    ('variables', 'link', 'picture'),
    [
        ({}, 'words (`docs/page.md`)', '*a net*'),
        (
            {'GITHUB_SERVER_URL': 'https://server', 'GITHUB_REPOSITORY': 'name/here'},
            '[words](https://server/name/here/blob/1f/docs/page.md)',
            '![a net](https://server/name/here/raw/1f/a.png)',
        ),
    ],
)
def test_links_of_the_package_s_page(variables, link, picture):
    """An index of packages resolves no relative link."""
    address = ci.long_description.repository(variables)
    made = ci.long_description.long_description(
        '[words](docs/page.md) ![a net](a.png) [x](https://a.b)', address, '1f'
    )
    assert made == f'{link} {picture} [x](https://a.b)'
    page = ci.long_description.long_description(README, address, '1f')
    assert not re.search(r'\]\((?!https://)', page)
    assert 'What a mask costs' in page
