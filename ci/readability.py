"""Prints how hard the source is to read: `python ci/readability.py [SRC …]`, one table for each source tree.

It is a mirror, not a gate. How each number is counted:

- Lines of code hold a token; docstrings, comments and blank lines do not count.
- The core is what makes masks and training steps: `_CORE` names its files and folders.
- What runs for one mask, or one step, are the functions that are called in it, with their lines of code. A mask is
  `instant_sparsify` of magnitude pruning at 90 %; a step is `tx.update` of RigL around Adam while it is traced.
- A private function with one caller: its name begins with one underscore, and stands once more in its file, outside of
  itself.
"""

import ast
import collections
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_CORE = set(
    'api algorithms base_updater checks plan mask_calculator selection n_by_m sparse_state packing sparsity_types '
    'sparsity_distributions sparsity_schedules tree utils core control seeds caller_warnings '
    'explicit_meshes'.split()
)

# Run in a process of its own with the measured tree on its path; prints {case: {file: [first lines]}}.
_PROBE = """
import json, sys
import jax, jax.numpy as jnp, optax
import jaxpruner

def functions_that_run(function):
    functions = {}
    def record(frame, event, argument):
        code = frame.f_code
        if event == 'call' and '/jaxpruner/' in code.co_filename:
            functions.setdefault(code.co_filename, set()).add(code.co_firstlineno)
    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return {file: sorted(lines) for file, lines in functions.items()}

params = {'w': jnp.ones((1024, 1024)), 'b': jnp.ones(1024)}
pruner = jaxpruner.MagnitudePruning(sparsity=0.9)
tx = jaxpruner.RigL(jaxpruner.PeriodicSchedule(10, 1, 100), sparsity=0.9).wrap_optax(optax.adam(1e-3))
state = tx.init(params)
print(json.dumps({
    'one 90 % mask': functions_that_run(lambda: pruner.instant_sparsify(params)),
    'one RigL step, traced': functions_that_run(lambda: jax.jit(tx.update).lower(params, state, params)),
}))
"""


@dataclasses.dataclass
class Size:
    """How much files hold."""

    files: int = 0
    lines_of_code: int = 0
    called_once: int = 0  # private functions with one caller

    def __add__(self, other: 'Size') -> 'Size':
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Size(*map(sum, pairs))

    def __str__(self) -> str:
        rate = 1000 * self.called_once / max(self.lines_of_code, 1)
        return (
            f'{self.lines_of_code:6} lines of code in {self.files:3} files, '
            f'{rate:4.1f} private functions with one caller per 1,000'
        )


def size_of(path: Path) -> Size:
    """The size of one file."""
    source = path.read_text()
    program = ast.parse(source)
    return Size(1, len(_lines_of_code(source, program)), _called_once(program))


def _lines_of_code(source: str, program: ast.Module) -> set[int]:
    lines_of_docstrings = set(_docstring_lines(program))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and token.start[0] not in lines_of_docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring_lines(program: ast.Module) -> Iterator[int]:
    for node in ast.walk(program):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, docstring.end_lineno + 1)


def _called_once(program: ast.Module) -> int:
    uses = _names_in(program)
    number = 0
    for node in ast.walk(program):
        if isinstance(node, ast.FunctionDef) and re.match('_[a-z]', node.name):
            number += uses[node.name] - _names_in(node)[node.name] == 1
    return number


def _names_in(node: ast.AST) -> collections.Counter:
    named = [getattr(n, 'id', getattr(n, 'attr', None)) for n in ast.walk(node)]
    return collections.Counter(name for name in named if name)


def what_runs(source: Path) -> dict[str, str]:
    """What has to be read for a mask, and for a step."""
    environment = {**os.environ, 'PYTHONPATH': str(source)}
    command = [sys.executable, '-c', _PROBE]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    cases = {}
    for case, functions in json.loads(printed).items():
        lines = sum(len(_lines_that_run(Path(path), first)) for path, first in functions.items())
        number = sum(map(len, functions.values()))
        cases[case] = f'{len(functions)} files, {number} functions, {lines} lines of code'
    return cases


def _lines_that_run(path: Path, first_lines: list[int]) -> set[int]:
    """The lines of code of the functions that begin on these lines, decorators and inner functions included."""
    source = path.read_text()
    program = ast.parse(source)
    lines: set[int] = set()
    for node in ast.walk(program):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            decorators = getattr(node, 'decorator_list', [])
            first = min([node.lineno, *[decorator.lineno for decorator in decorators]])
            if first in first_lines:
                lines.update(range(first, node.end_lineno + 1))
    return lines & _lines_of_code(source, program)


def report(source: Path) -> dict[str, str]:
    """The rows of one tree: what is counted, and how many."""
    sizes: dict[str, Size] = collections.defaultdict(Size)
    for path in sorted((source / 'jaxpruner').rglob('*.py')):
        parts = path.relative_to(source / 'jaxpruner').parts
        room = f'{parts[0]}/' if len(parts) > 1 else 'modules'
        for name in (room, 'all', *(['core of all'] if Path(parts[0]).stem in _CORE else [])):
            sizes[name] += size_of(path)
    return {name: str(size) for name, size in sizes.items()} | what_runs(source)


if __name__ == '__main__':
    for tree in sys.argv[1:] or [str(ROOT / 'src')]:
        print(tree)
        for name, amount in report(Path(tree).resolve()).items():
            print(f'  {name:22} {amount}')
