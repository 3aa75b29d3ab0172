"""`jaxpruner COMMAND …`: finds the command, reads its options, runs it, and turns errors into one line."""

import contextlib
import errno
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxpruner.cli import help_texts, interrupts, output, refusals, wording
from jaxpruner.cli.commands import COMMANDS, without_extra
from jaxpruner.files.system_errors import with_remedy
from jaxpruner.tree import nearest

_TRACEBACK = '--traceback'
_COMPLETION = '--tyro-'
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
# What a shell reports of a program that SIGINT ended.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: the command line behind `jaxpruner`; by default that of this process.

    Returns:
      The exit status: 0, 2 after an error, 130 after Ctrl-C, or what the command says.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = _TRACEBACK in command_line or os.environ.get('JAXPRUNER_TRACEBACK') == '1'
    command_line = [argument for argument in command_line if argument != _TRACEBACK]
    options: set[str] = set()  # of the command, once it is known
    try:
        with interrupts.heard_interrupts(), _warnings_in_one_line(options), _whole_output():
            return _run(command_line, options)
    except SystemExit as ending:  # tyro has said why
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except KeyboardInterrupt:
        print('jaxpruner: stopped', file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        return 0
    except (ValueError, TypeError, KeyError, OSError, ImportError, MemoryError) as error:
        if shows_traceback:
            traceback.print_exc()
        _complain(_words(error), options)
        return 2


def _run(command_line: list[str], options: set[str]) -> int:
    if not command_line or command_line[0] in ('-h', '--help'):
        print(help_texts.overview())
        return 0 if command_line else 2
    name = command_line[0]
    if name == '--version':
        print(f'jaxpruner {_version()}')
        return 0
    if name.startswith(_COMPLETION):
        return _complete(command_line)
    if name not in COMMANDS:
        raise ValueError(f'there is no command {name!r}; {nearest(name, COMMANDS)}')
    command = COMMANDS[name]
    try:
        command_class = command.load()
        options.update(getattr(command_class, '__dataclass_fields__', ()))
        return _parse(name, command_class, command_line[1:]).run() or 0
    except ModuleNotFoundError as error:
        raise without_extra(name, command.extra, error) from error


def _parse(name: str, command_class: type, arguments: list[str]) -> Any:
    """Returns the command with its options, or raises an error of one line, or prints the help."""
    import tyro

    printed = io.StringIO()
    errors = io.StringIO()
    description = help_texts.description(command_class)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            return tyro.cli(
                command_class,
                prog=f'jaxpruner {name}',
                description=description,
                args=_joined(command_class, arguments),
            )
    except SystemExit as ending:
        if not ending.code:
            print(help_texts.wrapped(printed.getvalue()))
            raise
        words = (
            printed.getvalue() + errors.getvalue()
        )  # releases of tyro differ in where they print
        raise ValueError(refusals.explain(name, command_class, arguments, words)) from None


def _joined(command_class: type, arguments: list[str]) -> list[str]:
    """Puts the values of a repeated option together, of which tyro would take the last alone, behind all else."""
    fields = getattr(command_class, '__dataclass_fields__', {}).values()
    lists = [f'--{field.name}' for field in fields if isinstance(field.default, tuple)]
    values: dict[str, list[str]] = {}
    others: list[str] = []
    current = others
    for argument in arguments:
        name, equals, value = argument.partition('=')
        if name in lists:
            current = values.setdefault(name, [])
            if equals:
                current.append(value)
                current = others
            continue
        if re.match('--?[a-z]', argument):
            current = others
        current.append(argument)
    return [*others, *(word for name in values for word in (name, *values[name]))]


def _complete(command_line: list[str]) -> int:
    """Prints the completion script, for those commands whose needs are installed."""
    try:
        from tyro import extras
    except ModuleNotFoundError as error:
        raise without_extra('completion', 'cli', error) from error
    classes = {}
    for name, command in COMMANDS.items():
        try:
            classes[name] = command.load()
        except ModuleNotFoundError as error:
            _complain(f'left out: {without_extra(name, command.extra, error)}')
    extras.subcommand_cli_from_dict(classes, prog='jaxpruner', args=command_line)
    return 0


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version('jaxpruner')
    except metadata.PackageNotFoundError:
        return 'of a source tree that is not installed'


def _words(error: BaseException) -> object:
    if isinstance(error, OSError):
        return with_remedy(error)
    if isinstance(error, MemoryError):
        return f'there is not enough memory: {error}'
    if isinstance(error, KeyError) and error.args:  # its text is the quoted key
        return error.args[0]
    return error


def _complain(message: object, options: Collection[str] = (), prefix: str = '') -> None:
    line = ' '.join(wording.in_options(str(message), options).split())
    print(f'jaxpruner: {prefix}{output.printable(line)}', file=sys.stderr)


@contextlib.contextmanager
def _warnings_in_one_line(options: Collection[str]) -> Iterator[None]:
    """Leaves out the line of code that warns, which says nothing to the user of a command."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: _complain(message, options, 'warning: ')
        yield


@contextlib.contextmanager
def _whole_output() -> Iterator[None]:
    """Flushes the output while an error about a full disk or a closed pipe can be shown; at exit it is too late."""
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
