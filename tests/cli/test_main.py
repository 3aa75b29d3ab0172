"""The command itself: its help, its errors in one line, its exit statuses."""

import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import jaxpruner
from helpers.made_up_cells import make_cell
from jaxpruner.cli import main as cli
from jaxpruner.report import write_cell


def test_help_lists_every_command(capsys):
    assert cli.main(['--help']) == 0
    shown = capsys.readouterr().out
    for name in cli.commands():
        assert name in shown
        assert cli.main([name, '--help']) == 0
        assert capsys.readouterr().out.startswith(f'usage: jaxpruner {name}')
    assert 'jaxpruner prune model.safetensors --sparsity 0.8' in shown
    assert cli.main([]) == 2
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out.endswith(f'jaxpruner {metadata.version("jaxpruner")}\n')


def run_python(*arguments):
    """A process of its own."""
    environment = {**os.environ, 'PYTHONPATH': str(Path(jaxpruner.__file__).parents[1])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_only_the_command_that_needs_them_loads_optional_packages():
    code = """
import sys
from jaxpruner.cli.main import main
for line in ('--help', 'prune --help', 'table nowhere', 'compare vit --nothing'):
    main(line.split())
print(sorted({'flax', 'orbax', 'matplotlib', 'safetensors'} & sys.modules.keys()))
"""
    assert run_python('-c', code).stdout.splitlines()[-1] == '[]'


def test_as_a_module(tmp_path):
    run = run_python('-m', 'jaxpruner', 'inspect', tmp_path / 'nowhere')
    assert run.returncode == 2
    assert run.stderr == f'jaxpruner: {tmp_path}/nowhere: there is no such file or folder\n'


@pytest.mark.parametrize(
    ('line', 'words'),
    [
        ('inspekt', 'inspect'),
        ('inspect x --jsn', '--json'),
        ('plot folder --kind lines', 'layers'),
    ],
)
def test_wrong_arguments_are_refused_in_tyros_words(line, words, capsys):
    assert cli.main(line.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.out + printed.err  # releases of tyro differ in where they print


@pytest.fixture
def failing(monkeypatch):
    """Puts a function that raises an error in the place of a command."""

    def put(error):
        def fail() -> None:
            raise error

        monkeypatch.setattr(cli, 'commands', lambda: {'fail': fail, 'other': fail})

    return put


@pytest.mark.parametrize(
    ('error', 'status', 'line'),
    [
        (ValueError('wrong\n  value \x1b[31m'), 2, 'wrong value \\x1b[31m'),
        (KeyError('no such key'), 2, 'no such key'),
        (MemoryError(), 2, 'MemoryError'),
        (
            ModuleNotFoundError("No module named 'flax'"),
            2,
            "No module named 'flax'; pip install 'jaxpruner[all]' installs whatever the commands need",
        ),
        (KeyboardInterrupt(), 130, 'stopped'),
    ],
)
def test_errors_are_one_line(failing, capsys, error, status, line):
    failing(error)
    assert cli.main(['fail']) == status
    assert capsys.readouterr() == ('', f'jaxpruner: {line}\n')


def test_mistakes_of_the_code_are_not_hidden_and_a_traceback_is_shown_when_asked_for(
    failing, capsys
):
    failing(ValueError('wrong'))
    assert cli.main(['fail', '--traceback']) == 2
    assert 'Traceback (most recent call last)' in capsys.readouterr().err
    failing(AssertionError('a bug'))
    with pytest.raises(AssertionError):
        cli.main(['fail'])


@pytest.fixture
def results(tmp_path):
    write_cell(tmp_path, make_cell())
    return str(tmp_path)


@pytest.mark.parametrize('where', ['closed pipe', 'full disk'])
def test_output_that_cannot_be_written(where, results, monkeypatch, capsys):
    if where == 'full disk':
        descriptor = os.open('/dev/full', os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    with os.fdopen(descriptor, 'w') as output:  # closing it writes what is left
        monkeypatch.setattr(sys, 'stdout', output)
        status = cli.main(['table', results])
        monkeypatch.undo()
    said = 'jaxpruner: [Errno 28] No space left on device\n'
    assert (status, capsys.readouterr().err) == ((2, said) if where == 'full disk' else (0, ''))


def test_warnings_are_one_line(results, capsys):
    path = Path(results, 'cells', 'rigl_0.8_0.json')
    path.write_bytes(b'\xff')
    with warnings.catch_warnings():
        warnings.simplefilter('default')
        assert cli.main(['table', results]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f'jaxpruner: warning: {path} is no result of this version: ')
    assert said.count('\n') == 1
