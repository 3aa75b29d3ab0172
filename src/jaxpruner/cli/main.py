"""`jaxpruner COMMAND …`: finds the command, reads its options, runs it, and turns errors into one line.

A command is a row in `COMMANDS` and a file with a frozen dataclass: its fields are the options, `run` does the work.
Its file is loaded only when it is called, so that each needs its own extra alone, and JAX only when it runs.
"""

import contextlib
import errno
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jaxpruner.cli import interrupts, refusals, wording
from jaxpruner.core.nearest_names import nearest
from jaxpruner.core.system_errors import with_remedy


class Command(NamedTuple):
    """A row of the table of commands.

    >>> Command('jaxpruner.cli.inspect', 'Inspect', 'CHECKPOINT', 'what is in a checkpoint', 'checkpoint').extra
    'checkpoint'
    """

    module: str
    name: str  # of the dataclass
    arguments: str  # those without a name, for the list of commands
    words: str  # what it does, for the same list
    extra: str  # installs what it needs


COMMANDS = {
    'run': Command(
        'jaxpruner.cli.run', 'Run', 'WORKLOAD', 'train a model with one algorithm', 'baselines'
    ),
    'compare': Command(
        'jaxpruner.cli.compare', 'Compare', 'WORKLOAD', 'train it with each algorithm', 'baselines'
    ),
    'inspect': Command(
        'jaxpruner.cli.inspect',
        'Inspect',
        'CHECKPOINT',
        'sparsity, structure and bytes, leaf by leaf',
        'checkpoint',
    ),
    'prune': Command(
        'jaxpruner.cli.prune',
        'Prune',
        'CHECKPOINT',
        'write a checkpoint with its smallest weights removed',
        'checkpoint',
    ),
    'table': Command(
        'jaxpruner.cli.table', 'Table', 'FOLDERS', 'results of runs as a table', 'cli'
    ),
    'order': Command(
        'jaxpruner.cli.order', 'Order', 'FOLDERS', "their order against the original's table", 'cli'
    ),
    'plot': Command('jaxpruner.cli.plot', 'Plot', 'FOLDERS', 'results of runs as images', 'plot'),
}

_EXAMPLES = """\
examples:
  jaxpruner compare digits-resnet --algorithms magnitude rigl --sparsities 0.8
  jaxpruner inspect model.safetensors
  jaxpruner prune model.safetensors --sparsity 0.8 --out sparse.safetensors
  jaxpruner table out/digits-resnet out/vit --out table.md
  jaxpruner plot out/digits-resnet --kind sparsity --out plot.png

`jaxpruner COMMAND --help` says more; `jaxpruner --version` names the release.
`jaxpruner --tyro-print-completion bash` (or zsh, tcsh) prints completion.
--traceback, anywhere, or JAXPRUNER_TRACEBACK=1 shows where an error comes from.
Tables are as wide as COLUMNS says, else as the terminal, else 80 columns."""

_TRACEBACK = '--traceback'
_COMPLETION = '--tyro-'
_HELP_WIDTH = 80
_NO_DEFAULT = re.compile(r'[ \n]*\(default:[ \n]+(None)?\)')
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
# What a shell reports of a program that SIGINT ended.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: the command line behind `jaxpruner`; by default that of this process.

    Returns:
      The exit status: 0, 2 after an error, 130 after Ctrl-C, or what the command says.

    >>> main(['--help'])
    usage: jaxpruner COMMAND …
    ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    shown = _TRACEBACK in given or os.environ.get('JAXPRUNER_TRACEBACK') == '1'
    given = [argument for argument in given if argument != _TRACEBACK]
    options: set[str] = set()  # of the command, once it is known
    try:
        with interrupts.heard_interrupts(), _warnings_in_one_line(options), _whole_output():
            return _status(given, options)
    except KeyboardInterrupt:
        print('jaxpruner: stopped', file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        return 0
    except (ValueError, TypeError, KeyError, OSError, ImportError, MemoryError) as error:
        if shown:
            traceback.print_exc()
        _complain(_words(error), options)
        return 2


def _words(error: BaseException) -> object:
    if isinstance(error, OSError):
        return with_remedy(error)
    if isinstance(error, MemoryError):
        return f'there is not enough memory: {error}'
    return (
        error.args[0] if isinstance(error, KeyError) and error.args else error
    )  # its text is the quoted key


def _status(given: list[str], options: set[str]) -> int:
    try:
        return _run(given, options)
    except SystemExit as ending:  # tyro has said why
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)


def _run(given: list[str], options: set[str]) -> int:
    if not given or given[0] in ('-h', '--help'):
        print(_overview())
        return 0 if given else 2
    if given[0] == '--version':
        print(f'jaxpruner {_version()}')
        return 0
    if given[0].startswith(_COMPLETION):
        return _complete(given)
    if given[0] not in COMMANDS:
        raise ValueError(f'there is no command {given[0]!r}; {nearest(given[0], COMMANDS)}')
    command = COMMANDS[given[0]]
    try:
        kind = _load(command)
        options.update(getattr(kind, '__dataclass_fields__', ()))
        return _parsed(given[0], kind, given[1:]).run() or 0
    except ModuleNotFoundError as error:
        raise _without_extra(given[0], command.extra, error) from error


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version('jaxpruner')
    except metadata.PackageNotFoundError:
        return 'of a source tree that is not installed'


def _complain(what: object, options: Collection[str] = (), start: str = '') -> None:
    text = ' '.join(wording.in_options(str(what), options).split())
    shown = ''.join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    print(f'jaxpruner: {start}{shown}', file=sys.stderr)


@contextlib.contextmanager
def _warnings_in_one_line(options: Collection[str]) -> Iterator[None]:
    """Without the line of code that warns, which says nothing to who called a command."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: _complain(message, options, 'warning: ')
        yield


@contextlib.contextmanager
def _whole_output() -> Iterator[None]:
    """Writes what is still in the buffer, while a full disk or a closed pipe can be told; at exit it is too late."""
    with contextlib.suppress(AttributeError):  # tests put other objects there
        sys.stdout.reconfigure(errors='backslashreplace')  # pyright: ignore  # names that are no UTF-8
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        if error.filename is None and error.errno in _FULL:
            raise with_remedy(error, 'standard output') from error
        raise


def _discard_output() -> None:
    """Sends the buffer nowhere, if it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _load(command: Command) -> type:
    return getattr(importlib.import_module(command.module), command.name)


def _without_extra(what: str, extra: str, error: ModuleNotFoundError) -> ImportError:
    if error.name is None or error.name.partition('.')[0] == 'jaxpruner':
        return error
    extras = ','.join(dict.fromkeys(('cli', extra)))
    return ImportError(
        f"{what} needs {error.name}, which is not installed: pip install 'jaxpruner[{extras}]'"
    )


def _description(options: type) -> str:
    """The docstring without its doctest."""
    return (inspect.getdoc(options) or '').partition('>>>')[0].strip()


def _parsed(name: str, kind: type, given: list[str]) -> Any:
    """The command with its options, or an error in one line, or the help."""
    import tyro

    output, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind, prog=f'jaxpruner {name}', description=_description(kind), args=given
            )
    except SystemExit as ending:
        printed = output.getvalue()
        if ending.code:
            printed += errors.getvalue()  # which of the two it is depends on the release of tyro
            raise ValueError(refusals.explain(name, kind, given, printed)) from None
        _print_help(printed)
        raise


def _print_help(text: str) -> None:
    """Wraps what tyro prints into lines that fit; it does so itself only inside of its boxes."""
    text = _NO_DEFAULT.sub(
        lambda default: '' if '\n' in default[0] else ' ' * len(default[0]), text
    )
    for line in text.splitlines():
        is_free = len(line) > _HELP_WIDTH and line[0].isalpha()
        indent = ' ' * 7 if line.startswith('usage: ') else ''
        print(
            textwrap.fill(line, _HELP_WIDTH, subsequent_indent=indent) if is_free else line.rstrip()
        )


def _complete(given: list[str]) -> int:
    """Prints the completion script, for those commands whose needs are installed."""
    try:
        from tyro import extras
    except ModuleNotFoundError as error:
        raise _without_extra('completion', 'cli', error) from error
    loaded = {}
    for name, command in COMMANDS.items():
        try:
            loaded[name] = _load(command)
        except ModuleNotFoundError as error:
            _complain(f'left out: {_without_extra(name, command.extra, error)}')
    extras.subcommand_cli_from_dict(loaded, prog='jaxpruner', args=given)
    return 0


def _overview() -> str:
    rows = [(f'{name} {command.arguments}', command.words) for name, command in COMMANDS.items()]
    width = max(len(call) for call, _ in rows)
    lines = [f'  {call:<{width}}   {words}' for call, words in rows]
    return '\n'.join(
        [
            'usage: jaxpruner COMMAND …',
            '',
            'Pruning and sparse training for JAX.',
            '',
            'commands:',
            *lines,
            '',
            _EXAMPLES,
        ]
    )
