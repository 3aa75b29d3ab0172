"""What --help prints, in lines of 80 columns."""

import inspect
import re
import textwrap

from jaxpruner.cli.commands import COMMANDS

_WIDTH = 80
_NO_DEFAULT = re.compile(r'[ \n]*\(default:[ \n]+(None)?\)')
_OVERVIEW = """\
usage: jaxpruner COMMAND …

Pruning and sparse training for JAX.

commands:
{commands}

examples:
  jaxpruner compare digits-resnet --algorithms magnitude rigl --sparsities 0.8
  jaxpruner inspect model.safetensors
  jaxpruner prune model.safetensors --sparsity 0.8 --out sparse.safetensors
  jaxpruner pack sparse.safetensors --out packed.safetensors
  jaxpruner table out/digits-resnet out/vit --out table.md
  jaxpruner plot out/digits-resnet --kind sparsity --out plot.png

`jaxpruner COMMAND --help` says more; `jaxpruner --version` names the release.
`jaxpruner --tyro-print-completion bash` (or zsh, tcsh) prints completion.
--traceback, anywhere, or JAXPRUNER_TRACEBACK=1 shows where an error comes from.
Tables are as wide as COLUMNS says, else as the terminal, else 80 columns."""


def overview() -> str:
    """Lists the commands, with examples."""
    calls = {f'{name} {command.arguments}': command for name, command in COMMANDS.items()}
    width = max(map(len, calls))
    lines = [f'  {call:<{width}}   {command.words}' for call, command in calls.items()]
    return _OVERVIEW.format(commands='\n'.join(lines))


def description(options: type) -> str:
    """Describes a command in the words of its docstring."""
    return inspect.getdoc(options) or ''


def wrapped(text: str) -> str:
    """Wraps what tyro prints into lines that fit; it does so itself only inside of its boxes."""
    lines = []
    for line in _NO_DEFAULT.sub(_blank, text).splitlines():
        is_outside = len(line) > _WIDTH and line[0].isalpha()
        indent = ' ' * 7 if line.startswith('usage: ') else ''
        lines.append(
            textwrap.fill(line, _WIDTH, subsequent_indent=indent) if is_outside else line.rstrip()
        )
    return '\n'.join(lines)


def _blank(match: re.Match[str]) -> str:
    """Keeps the length of a line, so that the box stays whole."""
    return '' if '\n' in match[0] else ' ' * len(match[0])
