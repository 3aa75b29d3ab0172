"""Results on disk: one JSON file for each finished cell of a comparison, which is an algorithm, sparsity and seed.

A cell is written beside its file and renamed; one that cannot be read is named, and never taken for a result.
"""

import dataclasses
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, Literal

from jaxpruner import atomic_files

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of training one workload with one algorithm, sparsity and seed.

    Numbers are Python's own. A metric may be NaN, as of a training that diverged: the file then says `NaN`, which
    Python reads back.

    Raises:
      ValueError: a field has another type or range than it should.

    >>> cell = Cell(
    ...     workload='resnet', data='digits', algorithm='magnitude', sparsity=0.8, seed=0, metric='accuracy',
    ...     better='high', value=0.97, metrics={'loss': 0.1}, reached=0.8, layers={'conv/kernel': 0.8}, steps=1000,
    ...     seconds=12.3, recipe='5d41402a')
    >>> cell.name
    'magnitude_0.8_0'
    """

    workload: str
    data: str
    algorithm: str
    sparsity: float  # asked for, in [0, 1]; 0 for no_prune
    seed: int
    metric: str  # what `value` is
    better: Literal['high', 'low']  # which values of the metric are good
    value: float
    metrics: dict[str, float]  # whatever else was measured at the end
    reached: float  # sparsity over all prunable leaves, in [0, 1]
    layers: dict[str, float]  # path of a leaf -> its sparsity, in [0, 1]
    steps: int  # updates of the optimizer
    seconds: float  # wall-clock time
    recipe: str  # SHA-256 of the recipe file
    version: int = VERSION

    def __post_init__(self):
        for field in dataclasses.fields(self):
            fits, wanted = _FIELDS[field.name]
            value = getattr(self, field.name)
            if not fits(value):
                raise ValueError(f'{field.name} must be {wanted}, got {value!r} of type {type(value).__name__}')

    @property
    def name(self) -> str:
        """The name of its files: algorithm, sparsity and seed."""
        return f'{self.algorithm}_{float(self.sparsity)}_{self.seed}'


def write_cell(folder: Path, cell: Cell) -> None:
    """Writes `cells/<name>.json` into a folder of results, which is made where it is missing.

    Args:
      folder: the folder of results.
      cell: what to write; a file of the same name is replaced.

    >>> import tempfile
    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_cell(Path(folder), cell)
    ...     [path.name for path in Path(folder, 'cells').iterdir()]
    ['rigl_0.8_0.json']
    """
    path = Path(folder) / 'cells' / f'{cell.name}.json'
    text = json.dumps({'version': cell.version} | dataclasses.asdict(cell), indent=1) + '\n'
    atomic_files.replace_file(path, lambda temporary: temporary.write_text(text))


def read_cells(folder: Path, set_aside: bool = False) -> list[Cell]:
    """Reads all cells of a folder of results; warns of each file that is none.

    Args:
      folder: the folder of results.
      set_aside: also rename such a file to `….json.corrupt`, so that its cell counts as not yet run.

    Returns:
      The cells that could be read, by file name.

    Raises:
      FileNotFoundError: the folder, or any `cells/*.json` in it, is missing.

    >>> import tempfile
    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_cell(Path(folder), cell)
    ...     read_cells(Path(folder)) == [cell]
    True
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f'no folder {folder}; results lie in the folder that --out of `jaxpruner compare` named'
        )
    paths = sorted(folder.glob('cells/*.json'))
    if not paths:
        raise FileNotFoundError(f'no results in {folder}: looked for {folder / "cells" / "*.json"}')
    cells = []
    for path in paths:
        try:
            cells.append(_read_cell(path))
        except ValueError as error:
            done = 'it is left out'
            if set_aside:
                aside = path.with_suffix('.json.corrupt')
                os.replace(path, aside)
                done = f'it is now {aside.name}'
            warnings.warn(f'{path} is no result of this version: {error}; {done}', stacklevel=2)
    return cells


def _read_cell(path: Path) -> Cell:
    content = json.loads(path.read_bytes().decode())  # what both raise are ValueErrors
    if not isinstance(content, dict):
        raise ValueError(f'it holds no table of keys but {type(content).__name__}')
    if content.get('version') != VERSION:
        raise ValueError(f'its version is {content.get("version")!r}, not {VERSION}')
    for problem, keys in (('lacks', _FIELDS.keys() - content.keys()), ('has unknown', content.keys() - _FIELDS.keys())):
        if keys:
            raise ValueError(f'it {problem} {", ".join(sorted(keys))}')
    cell = Cell(**content)
    if cell.name != path.stem:
        raise ValueError(f'it holds the cell {cell.name}')
    return cell


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_table_of(fits: Any) -> Any:
    return lambda table: isinstance(table, dict) and all(_is_text(key) and fits(value) for key, value in table.items())


_TEXT = (_is_text, 'a text that is not empty')
_COUNT = (_is_count, 'a whole number of at least 0')
_NUMBER = (_is_number, 'a number')
_SHARE = (_is_share, 'a number in [0, 1]')
_FIELDS = {
    'workload': _TEXT,
    'data': _TEXT,
    'algorithm': (
        lambda text: _is_text(text) and bool(re.fullmatch(r'[A-Za-z0-9_.-]+', text)),
        'a text of letters without accents, digits, _, - or .',
    ),
    'sparsity': _SHARE,
    'seed': _COUNT,
    'metric': _TEXT,
    'better': (lambda text: text in ('high', 'low'), "'high' or 'low'"),
    'value': _NUMBER,
    'metrics': (_is_table_of(_is_number), 'a dict of numbers'),
    'reached': _SHARE,
    'layers': (_is_table_of(_is_share), 'a dict of numbers in [0, 1]'),
    'steps': _COUNT,
    'seconds': _NUMBER,
    'recipe': _TEXT,
    'version': (lambda version: version == VERSION, str(VERSION)),
}
