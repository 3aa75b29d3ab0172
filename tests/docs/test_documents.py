"""Every snippet of the documents runs, every command is one that is run, and every link leads somewhere."""

import pathlib
import re
import shlex
import subprocess
import tomllib

import numpy as np
import pytest
import safetensors.numpy

from jaxpruner import api, jax_pruning
from jaxpruner.cli import main as cli

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md')]
)


def blocks(document, language):
    return re.findall(
        rf'^```{language}\n(.*?)^```', (ROOT / document).read_text(), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize(
    'document', [document for document in DOCUMENTS if blocks(document, 'python')]
)
def test_snippets_run_in_order(document, monkeypatch):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))
    namespace = {'__name__': document}
    for snippet in blocks(document, 'python'):
        exec(compile(snippet, document, 'exec'), namespace)


def test_the_documents_have_snippets():
    assert len(blocks('README.md', 'python')) == 2
    assert len(blocks('docs/guide.md', 'python')) >= 6
    assert len(blocks('docs/migrating.md', 'python')) == 11  # ten uses, and what they share
    assert len(blocks('docs/strategies.md', 'python')) >= 5
    assert len(blocks('docs/integrations.md', 'python')) == 2


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
    jobs = re.search(r'for job in (.*); do', (ROOT / '.ci' / 'run').read_text())
    assert jobs is not None
    run = {'bash run.sh' if job == 'test' else f'bash run.sh {job}' for job in jobs[1].split()}
    run.add(
        'bash run.sh integrations'
    )  # installs gigabytes: docs/integrations.md records its last result instead
    for document in DOCUMENTS:
        assert commands(document) <= run, document


@pytest.mark.slow
def test_the_command_line_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    safetensors.numpy.save_file({'kernel': weights}, 'model.safetensors')
    lines = ''.join(blocks('docs/command_line.md', 'console')).splitlines()
    assert len(lines) >= 8
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == 'jaxpruner'
        assert cli.main(arguments) == 0, capsys.readouterr().err


def test_the_commands_of_the_baselines_are_understood(capsys):
    lines = ''.join(blocks('docs/baselines.md', 'console')).splitlines()
    assert lines
    for line in lines:  # what they train takes an hour
        program, *arguments = shlex.split(line)
        assert program == 'jaxpruner'
        assert cli.main([*arguments, '--print-recipe']) == 0, capsys.readouterr().err


def test_run_sh_knows_the_commands():
    words = subprocess.run(
        ['bash', 'run.sh', 'help'], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for document in DOCUMENTS:
        for command in commands(document):
            assert command.removeprefix('bash run.sh').strip() in words
    wrong = subprocess.run(
        ['bash', 'run.sh', 'tset'], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "unknown command 'tset'" in wrong.stderr


@pytest.mark.parametrize('document', DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r'\]\(([^)#:]+)\)', (ROOT / document).read_text()):
        assert ((ROOT / document).parent / target).exists(), target


def table_rows(document):
    """Rows of tables, as numbers of their lines with their cells; code between backquotes may hold bars."""
    in_code = False
    for number, line in enumerate((ROOT / document).read_text().splitlines(), 1):
        in_code ^= line.startswith('```')
        if line.startswith('|') and not in_code:
            cells = re.sub(r'`[^`]*`', '', line.strip()).replace(r'\|', '').strip('|').split('|')
            yield number, cells


@pytest.mark.parametrize('document', DOCUMENTS)
def test_rows_of_tables_have_as_many_cells_as_their_header(document):
    last, width = -1, 0
    for number, cells in table_rows(document):
        if number != last + 1:
            width = len(cells)
        assert len(cells) == width, f'{document}:{number}'
        last = number


def test_the_guide_lists_every_algorithm():
    text = (ROOT / 'docs' / 'guide.md').read_text()
    training = {name: api.ALGORITHM_REGISTRY[name] for name in api.all_algorithm_names()}
    for room, registry in (('', training), (r'oneshot\.', api.ONE_SHOT_REGISTRY)):
        rows = re.findall(rf'^\| `(\w+)` \| `{room}(\w+)` \|', text, re.MULTILINE)
        assert dict(rows) == {name: algorithm.__name__ for name, algorithm in registry.items()}
