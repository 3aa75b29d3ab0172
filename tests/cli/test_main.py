"""The command itself: its help, its errors in one line, its exit statuses."""

import io
import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import jaxpruner
from helpers.made_up_cells import make_cell
from jaxpruner import api
from jaxpruner.cli import main as cli
from jaxpruner.cli.commands import COMMANDS, Command
from jaxpruner.oneshot import Wanda
from jaxpruner.report import write_cell


def test_help_lists_every_command(capsys):
    assert cli.main(['--help']) == 0
    shown = capsys.readouterr().out
    assert all(f'  {name} {command.arguments}' in shown for name, command in cli.COMMANDS.items())
    assert 'examples:' in shown
    assert cli.main([]) == 2


@pytest.mark.parametrize('name', cli.COMMANDS)
def test_every_command_has_help_with_examples(name, capsys):
    assert cli.main([name, '--help']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f'usage: jaxpruner {name}')
    assert f'  jaxpruner {name} ' in shown
    assert '>>>' not in shown


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert cli.main(['inspekt']) == 2
    assert (
        capsys.readouterr().err
        == "jaxpruner: there is no command 'inspekt'; did you mean 'inspect'?\n"
    )


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == f'jaxpruner {metadata.version("jaxpruner")}\n'


@pytest.mark.parametrize('arguments', [[], *([name] for name in cli.COMMANDS)], ids=str)
def test_help_stands_in_lines_of_80(arguments, capsys):
    assert cli.main([*arguments, '--help']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)


@pytest.mark.parametrize(
    'arguments',
    [
        '--help',
        '--version',
        'inspekt',
        *[f'{name} --help' for name in cli.COMMANDS],
        *[f'{name} --nothing' for name in cli.COMMANDS],
        'prune x --sparsity y',
        'inspect nowhere.safetensors',
        'prune nowhere.safetensors --sparsity 0.5 --out out',
        *[f'{name} nowhere' for name in ('table', 'order', 'plot')],
        'table',
    ],
)
def test_optional_packages_are_not_loaded_for_help_and_wrong_arguments(arguments):
    code = f"""
import sys
from jaxpruner.cli.main import main
main({arguments.split()!r})
print(sorted({{'flax', 'orbax', 'matplotlib', 'safetensors'}} & sys.modules.keys()))
"""
    environment = {**os.environ, 'PYTHONPATH': str(Path(jaxpruner.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.splitlines()[-1] == '[]'


@pytest.mark.parametrize(
    ('arguments', 'line'),
    [
        ('prune in out --sparsity 0.5', 'prune takes one CHECKPOINT; write to --out out'),
        ('prune in other --out out', 'prune takes one CHECKPOINT; leave other out'),
        (
            'prune in --sparsity 50% --out out',
            "--sparsity must lie in [0, 1], got '50%'; 50 per cent is 0.5",
        ),
        ('prune in --sparsity half --out out', "--sparsity must lie in [0, 1], got 'half'"),
        ('prune in --seed=x --out out', "--seed must be a whole number, got 'x'"),
        ('prune in --out', '--out needs a value'),
        (
            'prune in --scores randm --out out',
            "--scores: there is no 'randm'; did you mean 'random'?",
        ),
        ('prune in --only a b', 'prune needs --out; `jaxpruner prune --help` says what that is'),
        (
            'prune --overwrite',
            'prune needs CHECKPOINT and --out; `jaxpruner prune --help` says what that is',
        ),
        (
            'prune in --sparsty 0.5 --out out',
            "there is no option '--sparsty'; did you mean '--sparsity'?",
        ),
        (
            'prune in --overwite --out out',
            "there is no option '--overwite'; did you mean '--overwrite'?",
        ),
        ('inspect x --jsn', "there is no option '--jsn'; did you mean '--json'?"),
        ('inspect', 'inspect needs CHECKPOINT; `jaxpruner inspect --help` says what that is'),
        (
            'compare vit --sparsities 0.5 90%',
            "--sparsities must lie in [0, 1], got '90%'; 90 per cent is 0.9",
        ),
        ('compare vit --seeds 0 a', "--seeds must be a whole number, got 'a'"),
        ('plot folder --kind lines', "--kind: there is no 'lines'; did you mean 'layers'?"),
    ],
)
def test_wrong_arguments_are_one_line_that_names_the_remedy(arguments, line, capsys):
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr() == ('', f'jaxpruner: {line}\n')


@pytest.mark.parametrize(
    ('command', 'line', 'expected'),
    [
        ('prune', 'in --out out --skip a --skip b', {'skip': ('a', 'b')}),
        ('prune', 'in --out out --skip a b --only c --skip d', {'skip': ('a', 'b', 'd')}),
        ('prune', '--skip a --out out --skip b --sparsity 0.5 in', {'skip': ('a', 'b')}),
        ('prune', '--only=a in --out out --only=b', {'only': ('a', 'b')}),
        ('prune', 'in --types a=2:4 --types=b=1:4 --out out', {'types': ('a=2:4', 'b=1:4')}),
        ('prune', 'in --out out', {'skip': (), 'only': (), 'types': ()}),
        ('compare', 'vit --seeds 1 2 --seeds 3', {'seeds': (1, 2, 3)}),
        ('compare', 'vit --set a=1 --set b=2 --set c=3', {'set': ('a=1', 'b=2', 'c=3')}),
        ('compare', 'vit --sparsities 0.5 --sparsities 0.9', {'sparsities': (0.5, 0.9)}),
        ('compare', 'vit --algorithms set --algorithms rigl', {'algorithms': ('set', 'rigl')}),
        ('run', 'vit --modules a --modules b', {'modules': ('a', 'b')}),
        ('demo', '--set a=1 --set b=2', {'set': ('a=1', 'b=2')}),
    ],
)
def test_values_of_repeated_options_add_up(command, line, expected, monkeypatch):
    given = {}
    monkeypatch.setattr(COMMANDS[command].load(), 'run', lambda self: given.update(vars(self)))
    assert cli.main([command, *line.split()]) == 0
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize('name', sorted(api.ONE_SHOT_REGISTRY))
def test_scores_that_need_the_model_say_how_to_call_them(name, capsys):
    assert api.ONE_SHOT_REGISTRY['wanda'] is Wanda  # they are registered
    assert cli.main(['prune', 'in', '--scores', name, '--out', 'out']) == 2
    said = capsys.readouterr().err
    assert f"--scores: '{name}' needs the model" in said
    needed = 'loss_fn=' if name in ('snip', 'grasp') else 'apply_fn='
    assert f"jaxpruner.prune(params, 0.5, '{name}', {needed}" in said


def test_what_else_is_wrong_is_in_the_words_of_tyro(monkeypatch, capsys):
    def refuse(*_, **__):
        print(
            '\u256d\u2500 Error \u2500\u256e\n\u2502 it   is wrong \u2502\nFor full helptext, see x',
            file=sys.stderr,
        )
        sys.exit(2)

    monkeypatch.setattr('tyro.cli', refuse)
    assert cli.main(['inspect', 'x']) == 2
    assert capsys.readouterr() == (
        '',
        'jaxpruner: Error it is wrong; `jaxpruner inspect --help` says more\n',
    )


@pytest.mark.parametrize('name', ['prune', 'compare'])
def test_the_help_names_no_default_where_there_is_none(name, capsys):
    assert cli.main([name, '--help']) == 0
    shown = ' '.join(capsys.readouterr().out.split())
    assert '(default: )' not in shown
    assert '(default: None)' not in shown
    assert '(default: True)' in shown


@pytest.mark.parametrize('shell', ['bash', 'zsh'])
def test_completion_knows_commands_and_options(shell, capsys):
    assert cli.main(['--tyro-print-completion', shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*cli.COMMANDS, '--masks-out'))


class Failing:
    """A command, in place of one from the table."""

    def __init__(self, error):
        self.error = error

    def run(self):
        raise self.error


@pytest.fixture
def failing(monkeypatch):
    def fail(error):
        monkeypatch.setattr(Command, 'load', lambda command: Failing)
        monkeypatch.setattr('tyro.cli', lambda *args, **kwargs: Failing(error))

    return fail


@pytest.mark.parametrize(
    ('error', 'status', 'line'),
    [
        (ValueError('wrong\n  value'), 2, 'wrong value'),
        (TypeError('wrong type'), 2, 'wrong type'),
        (KeyError('no such key'), 2, 'no such key'),
        (
            FileNotFoundError(2, 'No such file or directory', 'x'),
            2,
            "[Errno 2] No such file or directory: 'x'",
        ),
        (OSError(5, 'Input/output error'), 2, '[Errno 5] Input/output error'),
        (MemoryError('of 8 GiB'), 2, 'there is not enough memory: of 8 GiB'),
        (
            ModuleNotFoundError("No module named 'flax.nnx'", name='flax.nnx'),
            2,
            "inspect needs flax.nnx, which is not installed: pip install 'jaxpruner[cli,checkpoint]'",
        ),
        (KeyboardInterrupt(), 130, 'stopped'),
    ],
)
def test_errors_are_one_line(failing, capsys, error, status, line):
    failing(error)
    assert cli.main(['inspect', 'x']) == status
    assert capsys.readouterr() == ('', f'jaxpruner: {line}\n')


def test_mistakes_of_the_code_are_not_hidden(failing):
    failing(AssertionError('a bug'))
    with pytest.raises(AssertionError):
        cli.main(['inspect', 'x'])


def test_a_traceback_is_shown_when_asked_for(failing, capsys, monkeypatch):
    failing(ValueError('wrong'))
    for arguments in (['--traceback', 'inspect', 'x'], ['inspect', 'x', '--traceback']):
        assert cli.main(arguments) == 2
        assert 'Traceback (most recent call last)' in capsys.readouterr().err
    monkeypatch.setenv('JAXPRUNER_TRACEBACK', '1')
    assert cli.main(['inspect', 'x']) == 2
    assert 'Traceback' in capsys.readouterr().err


def test_completion_leaves_out_what_is_not_installed(monkeypatch, capsys):
    missing = cli.COMMANDS['prune']._replace(module='jaxpruner_needs_what_is_not_there')
    monkeypatch.setitem(cli.COMMANDS, 'prune', missing)
    assert cli.main(['--tyro-print-completion', 'bash']) == 0
    assert 'left out: prune needs jaxpruner_needs_what_is_not_there' in capsys.readouterr().err


def test_as_a_module_in_a_process_of_its_own(tmp_path):
    run = subprocess.run(
        [sys.executable, '-m', 'jaxpruner.cli', 'inspect', tmp_path / 'nowhere'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr == f'jaxpruner: {tmp_path}/nowhere: there is no such file or folder\n'


@pytest.fixture
def results(tmp_path):
    write_cell(tmp_path, make_cell())
    return str(tmp_path)


@pytest.mark.parametrize('command', [['--help'], ['table'], ['table', '--format', 'csv']])
@pytest.mark.parametrize('where', ['closed pipe', 'full disk'])
def test_output_that_cannot_be_written(command, where, results, monkeypatch, capsys):
    if where == 'full disk':
        descriptor = os.open('/dev/full', os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    arguments = [*command, results] if command[0] == 'table' else command
    with os.fdopen(descriptor, 'w') as output:  # closing it writes what is left
        monkeypatch.setattr(sys, 'stdout', output)
        status = cli.main(arguments)
        monkeypatch.undo()
    remedy = 'free some there, or name another place'
    said = f"jaxpruner: [Errno 28] No space left on device; {remedy}: 'standard output'\n"
    assert (status, capsys.readouterr().err) == ((2, said) if where == 'full disk' else (0, ''))


def test_letters_that_the_output_does_not_have(results, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), 'ascii')
    monkeypatch.setattr(sys, 'stdout', output)
    assert cli.main(['table', results]) == 0
    assert rb'accuracy (%) \u2191' in output.buffer.getvalue()


def test_warnings_are_one_line(results, capsys):
    path = Path(results, 'cells', 'rigl_0.8_0.json')
    path.write_bytes(b'\xff')
    with warnings.catch_warnings():
        warnings.simplefilter('default')
        assert cli.main(['table', results]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f'jaxpruner: warning: {path} is no result of this version: ')
    assert said.count('\n') == 1
