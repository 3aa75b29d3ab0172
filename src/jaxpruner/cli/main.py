"""Pruning and sparse training for JAX.

  jaxpruner compare digits-resnet --algorithms magnitude rigl --sparsities 0.8
  jaxpruner inspect model.safetensors
  jaxpruner prune model.safetensors --sparsity 0.8 --out sparse.safetensors
  jaxpruner pack sparse.safetensors --out packed.safetensors
  jaxpruner table out/digits-resnet out/vit --out table.md
  jaxpruner plot out/digits-resnet --kind sparsity --out plot.png

`jaxpruner --version` names the release; --traceback, anywhere, shows where an error comes from.
"""

# What stands above is the help of the command. tyro reads the options, a function runs, and errors are one line.

import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from jaxpruner.text_tables import printable


def commands() -> dict[str, Callable[..., Any]]:
    """Returns the functions of all commands by name."""
    from jaxpruner.cli import checkpoints, results, training

    functions = (
        *(training.demo, training.run, training.compare),
        *(checkpoints.inspect, checkpoints.prune, checkpoints.pack, checkpoints.unpack),
        *(results.table, results.plot),
    )
    return {function.__name__: function for function in functions}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: the command line behind `jaxpruner`; by default that of this process.

    Returns:
      The exit status: 0, 2 after an error, 130 after Ctrl-C, or what the command says.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = '--traceback' in command_line
    command_line = [argument for argument in command_line if argument != '--traceback']
    if command_line == ['--version']:
        print(f'jaxpruner {metadata.version("jaxpruner")}')
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')  # for letters that it does not have
    try:
        import tyro

        with warnings.catch_warnings():
            # The line of code that warns says nothing to the user of a command.
            warnings.showwarning = lambda message, *where: _say(f'warning: {message}')
            status = tyro.extras.subcommand_cli_from_dict(
                commands(), prog='jaxpruner', description=__doc__, args=command_line
            )
            sys.stdout.flush()  # while an error can be shown
            return status or 0
    except SystemExit as ending:  # tyro has said why
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except KeyboardInterrupt:
        _say('stopped')
        return 130  # as a shell reports it
    except (ValueError, TypeError, KeyError, OSError, ImportError, MemoryError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            # The output cannot be written: what is left of it goes nowhere, else Python would fail at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # whoever read it has seen enough
                return 0
        if shows_traceback:
            traceback.print_exc()
        words = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        if isinstance(error, ModuleNotFoundError):
            words += "; pip install 'jaxpruner[all]' installs whatever the commands need"
        _say(words or type(error).__name__)
        return 2


def _say(words: str) -> None:
    print(f'jaxpruner: {printable(" ".join(words.split()))}', file=sys.stderr)
