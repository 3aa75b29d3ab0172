"""Every snippet of the documents runs, every command is one that is run, and every link leads somewhere."""

import contextlib
import io
import pathlib
import re
import shlex
import sys
import tomllib
import warnings

import numpy as np
import pytest
import safetensors.numpy

from docs.extensions import blocks_of_code
from jaxpruner import api, jax_pruning, sparsity_types
from jaxpruner.cli import main as cli

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = blocks_of_code.documents()


def blocks(document, language):
    return [block.code for block in blocks_of_code.blocks(document) if block.label == language]


@pytest.fixture
def registry(monkeypatch):
    """Algorithms and types that a page registers are taken out again; of the former everybody has the dictionary."""
    monkeypatch.setattr(sparsity_types, '_OWN_TYPES', {})
    before = dict(api.ALGORITHM_REGISTRY)
    yield
    api.ALGORITHM_REGISTRY.clear()
    api.ALGORITHM_REGISTRY.update(before)


@pytest.mark.slow  # all pages together
@pytest.mark.parametrize(
    'document', [document for document in DOCUMENTS if blocks(document, 'python')]
)
@pytest.mark.usefixtures('registry')
def test_snippets_run_in_order_and_print_what_stands_beneath(document, monkeypatch):
    if document == 'docs/how_to/keras.md':  # Keras 3.15 asks JAX for int64 where it traces a layer
        warnings.filterwarnings('ignore', 'Explicitly requested dtype int64')
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setenv('KERAS_BACKEND', 'jax')  # what a page sets is taken back
    namespace = {'__name__': document}
    for block in blocks_of_code.blocks(document):
        if block.label == 'python':
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block.code, document, 'exec'), namespace)
            assert printed.getvalue() == (block.output or '')


# Lines of shell code stand where a test runs them, or asks whether they are understood.
CONSOLE = {
    'docs/baselines.md',
    'docs/command_line.md',
    'docs/how_to/own_sparsity_type.md',
    'docs/installation.md',
    'docs/oneshot.md',
}


@pytest.mark.parametrize('document', DOCUMENTS)
def test_every_block_is_run_or_says_why_not(document):
    assert len(blocks_of_code.not_run()) <= blocks_of_code.MOST_NOT_RUN
    for block in blocks_of_code.blocks(document):
        if block.why_not_run:
            assert len(block.why_not_run) > 10
        elif block.label == 'console':
            assert document in CONSOLE
        else:  # `bash` is what the checks run, `toml` is read, `bibtex` is no code
            assert block.label in {'python', 'bash', 'toml', 'bibtex'}, block
        assert block.output is None or block.label == 'python'
        if block.label == 'python':  # the site has room for 100 characters
            assert max(map(len, block.code.splitlines())) <= 100


def test_strategies_in_files_are_strategies():
    strategies = [tomllib.loads(text) for text in blocks('docs/strategies.md', 'toml')]
    assert [jax_pruning.PruningStrategy.parse(strategy).epochs for strategy in strategies] == [
        (10, 20)
    ]


def commands(document):
    """Commands in blocks of shell code and in running text."""
    text = (ROOT / document).read_text()
    return set(''.join(blocks(document, 'bash')).split('\n')) - {''} | set(
        re.findall(r'`(bash run\.sh[^`]*)`', text)
    )


def test_every_command_is_run_by_the_checks():
    jobs = ' '.join(re.findall(r'for job in (.*); do', (ROOT / '.ci' / 'run').read_text()))
    # The first two are parts of `all`; the third installs gigabytes: docs/integrations.md records its last result.
    run = {'bash run.sh', 'bash run.sh test tests/test_tree.py', 'bash run.sh integrations'}
    run |= {f'bash run.sh {job}' for job in jobs.split()}
    for document in DOCUMENTS:
        assert commands(document) <= run, document


def run_line(line, capsys):
    program, *arguments = shlex.split(line)
    assert program == 'jaxpruner'
    assert cli.main(arguments) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    safetensors.numpy.save_file({'kernel': weights}, 'model.safetensors')
    lines = ''.join(blocks('docs/command_line.md', 'console')).splitlines()
    assert len(lines) >= 8
    for line in lines:
        run_line(line, capsys)


def test_a_module_with_a_type_of_ones_own_is_taken(tmp_path, monkeypatch, capsys):
    page = 'docs/how_to/own_sparsity_type.md'
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.delitem(sys.modules, 'mine', raising=False)
    monkeypatch.setattr(sparsity_types, '_OWN_TYPES', {})
    (tmp_path / 'mine.py').write_text(''.join(blocks(page, 'python')))
    weights = np.arange(1, 65, dtype=np.float32).reshape(8, 8)
    safetensors.numpy.save_file({'w': weights}, 'model.safetensors')
    for line in ''.join(blocks(page, 'console')).splitlines():
        run_line(line, capsys)
    (rows, columns) = safetensors.numpy.load_file('diagonal.safetensors')['w'].nonzero()
    assert len(rows) == 16
    assert len(set((columns - rows) % 8)) == 2


def test_the_commands_of_the_baselines_are_understood(capsys):
    lines = ''.join(blocks('docs/baselines.md', 'console')).splitlines()
    assert lines
    for line in lines:  # what they train takes an hour
        run_line(f'{line} --print-recipe', capsys)


def test_a_page_says_when_to_take_each_algorithm():
    text = (ROOT / 'docs' / 'explanation' / 'which_algorithm.md').read_text()
    rows = re.findall(r'^\| `(\w+)` \| \w', text, re.MULTILINE)
    assert sorted(rows) == sorted([*api.all_algorithm_names(), *api.ONE_SHOT_REGISTRY])


def anchors(page):
    """The address of each heading of a page."""
    headings = re.findall(r'^#+ (.*)$', re.sub(r'^```.*?^```', '', page, flags=re.M | re.S), re.M)
    return {re.sub(r'[^\w\- ]', '', heading).lower().replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('document', DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
    links = re.findall(r'\]\(([^)#:\s]*)(?:#([\w-]+))?\)', (ROOT / document).read_text())
    for target, anchor in links:
        path = (ROOT / document).parent / target if target else ROOT / document
        assert path.exists(), target
        if path == ROOT / 'docs' / 'contributing.md':
            path = ROOT / 'CONTRIBUTING.md'
        assert not anchor or anchor in anchors(path.read_text()), f'{target}#{anchor}'
