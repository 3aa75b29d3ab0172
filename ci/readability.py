"""Prints how hard the source is to read: `python ci/readability.py [SRC …]`, one column for each source tree.

It is a mirror, not a gate. How each number is counted:

- Lines of code hold a token; docstrings, comments and blank lines do not count. Tokens are Python's own, without the
  marks of indentation and line ends.
- Comprehensions are those of lists, sets and dictionaries, and generator expressions, for 1000 lines of code.
- What has to be read for one step, or one mask, are the functions that run in it: the files that hold them, the lines
  of those functions with their docstrings, and the lines of the whole files. A step is `tx.update` of magnitude pruning
  around Adam while it is traced; how it selects weights counts for the mask.
- An algorithm is named in its own file and in the files that name every algorithm.
"""

import ast
import dataclasses
import io
import json
import os
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
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Run in a process of its own with the measured tree on its path; prints {case: {file: [first lines]}}.
_PROBE = """
import json, sys
import jax, jax.numpy as jnp, optax
import jaxpruner
from jaxpruner import mask_calculator, sparsity_schedules

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

params = {'w': jnp.ones((64, 64)), 'b': jnp.ones(64)}
schedule = sparsity_schedules.PeriodicSchedule(update_freq=10, update_start_step=1, update_end_step=100)
tx = jaxpruner.MagnitudePruning(sparsity=0.9, scheduler=schedule).wrap_optax(optax.adam(1e-3))
state = tx.init(params)
print(json.dumps({
    'step': functions_that_run(lambda: jax.jit(tx.update).lower(params, state, params)),
    'mask': functions_that_run(lambda: mask_calculator.topk_mask_calculator(jnp.ones((64, 64)), 0.9)),
}))
"""


@dataclasses.dataclass
class Size:
    """How much a file, or a tree, holds."""

    lines: int = 0
    lines_of_code: int = 0
    tokens: int = 0
    comprehensions: int = 0

    def add(self, other: 'Size') -> None:
        """Counts another file, too."""
        self.lines += other.lines
        self.lines_of_code += other.lines_of_code
        self.tokens += other.tokens
        self.comprehensions += other.comprehensions


def size_of(path: Path) -> Size:
    """The size of one file."""
    source = path.read_text()
    program = ast.parse(source)
    lines_of_docstrings = set(_docstring_lines(program))
    lines_of_code = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NO_CODE or token.start[0] in lines_of_docstrings:
            continue
        tokens += 1
        lines_of_code.update(range(token.start[0], token.end[0] + 1))
    comprehensions = 0
    for node in ast.walk(program):
        comprehensions += isinstance(node, _COMPREHENSIONS)
    return Size(source.count('\n'), len(lines_of_code), tokens, comprehensions)


def _docstring_lines(program: ast.Module) -> Iterator[int]:
    for node in ast.walk(program):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, docstring.end_lineno + 1)


def sizes_of_packages(root: Path) -> dict[str, Size]:
    """The size of each package in a folder, of the modules beside them, and of all."""
    packages: dict[str, Size] = {}
    total = Size()
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).parts
        package = f'{parts[0]}/' if len(parts) > 1 else 'modules'
        size = size_of(path)
        packages.setdefault(package, Size()).add(size)
        total.add(size)
    return {**packages, 'all': total}


@dataclasses.dataclass
class Reading:
    """What somebody reads who follows a call."""

    files: int = 0
    lines_of_functions: int = 0
    lines_of_files: int = 0

    def __str__(self) -> str:
        return (
            f'{self.files} files, {self.lines_of_functions} lines of functions that run, '
            f'{self.lines_of_files} lines of these files'
        )


def what_to_read(source: Path) -> dict[str, Reading]:
    """What has to be read for a step, and for a mask."""
    environment = {**os.environ, 'PYTHONPATH': str(source)}
    command = [sys.executable, '-c', _PROBE]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    cases = json.loads(printed)
    readings = {}
    for case, functions in cases.items():
        reading = Reading()
        for path, first_lines in functions.items():
            if case == 'step' and '/selection/' in path:
                continue
            reading.files += 1
            reading.lines_of_functions += len(_lines_of_functions(Path(path), first_lines))
            reading.lines_of_files += size_of(Path(path)).lines
        readings[case] = reading
    return readings


def _lines_of_functions(path: Path, first_lines: list[int]) -> set[int]:
    """The lines of the functions that begin on these lines, decorators and inner functions included."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            decorators = getattr(node, 'decorator_list', [])
            first = min([node.lineno, *[decorator.lineno for decorator in decorators]])
            if first in first_lines:
                lines.update(range(first, node.end_lineno + 1))
    return lines


def places_of_an_algorithm(repository: Path) -> list[str]:
    """The files that name every algorithm, without the one that it is defined in."""
    exports = (repository / 'src/jaxpruner/algorithms/__init__.py').read_text()
    registry = (repository / 'src/jaxpruner/api.py').read_text()
    classes = []
    for line in exports.splitlines():
        name = line.rpartition(' ')[2]
        if f'algorithms.{name},' in registry:
            classes.append(name)
    texts = {}
    for folder in ('src', 'tests', 'docs'):
        for path in (repository / folder).rglob('*'):
            if path.suffix in ('.py', '.md'):
                texts[path] = path.read_text()
    places = []
    names = {name: _registered_name(registry, name) for name in classes}
    for path, text in texts.items():
        if all(name in text or f"'{names[name]}'" in text for name in classes):
            places.append(str(path.relative_to(repository)))
    return sorted(places)


def _registered_name(registry: str, class_name: str) -> str:
    line = next(line for line in registry.splitlines() if f'algorithms.{class_name},' in line)
    return line.split("'")[1]


def report(source: Path) -> list[tuple[str, str]]:
    """The rows of one tree: what is counted, and how many."""
    rows = []
    for package, size in sizes_of_packages(source / 'jaxpruner').items():
        code = max(size.lines_of_code, 1)
        density = f'{size.tokens / code:.1f} tokens, {1000 * size.comprehensions / code:.0f}'
        rows.append(
            (package, f'{size.lines} lines, {size.lines_of_code} of code, {density} comprehensions')
        )
    for case, reading in what_to_read(source).items():
        rows.append((f'one {case}', str(reading)))
    places = places_of_an_algorithm(source.parent)
    rows.append(('an algorithm', f'its file and {len(places)}: {", ".join(places)}'))
    return rows


def main(sources: list[str]) -> None:
    """Prints the report of each tree."""
    for source in sources or [str(ROOT / 'src')]:
        print(source)
        for name, amount in report(Path(source).resolve()):
            print(f'  {name:16} {amount}')


if __name__ == '__main__':
    main(sys.argv[1:])
