"""Results on disk: one JSON file for each finished cell of a comparison, which is one algorithm, sparsity and seed.

A cell's file appears when it is complete. It holds checksums of itself and of the files that belong to it. A file that
cannot be read, or has changed since it was written, is named in a warning and does not count as a result.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxpruner.caller_warnings import warn
from jaxpruner.files import atomic_files, input_files
from jaxpruner.report import seals

VERSION = 2  # 1 had no checksums


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of training one workload with one algorithm, sparsity and seed.

    Numbers are Python's own. A metric may be NaN, for instance if training diverged: the file then says `NaN`, which
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
        for name, rule in _FIELDS.items():
            value = getattr(self, name)
            if not rule.accepts(value):
                raise ValueError(
                    f'{name} must be {rule.description}, got {value!r} of type {type(value).__name__}'
                )

    @property
    def name(self) -> str:
        """The name of its files: algorithm, sparsity and seed."""
        return f'{self.algorithm}_{float(self.sparsity)}_{self.seed}'


def write_cell(folder: Path, cell: Cell) -> None:
    """Writes `cells/<name>.json` into a folder of results, which is made where it is missing.

    The file ends with a checksum of itself. It also holds checksums of the cell's metrics and masks, if those are
    there already.

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
    folder = Path(folder)
    checksums = {}
    for name in _files_of(cell.name):
        if (folder / name).is_file():
            checksums[name] = seals.checksum(folder / name)
    content = {'version': cell.version, **dataclasses.asdict(cell), 'files': checksums}
    sealed = seals.seal(json.dumps(content, indent=1))
    atomic_files.replace_file(_path_of(folder, cell.name), lambda path: path.write_bytes(sealed))


def read_cells(folder: Path, set_aside: bool = False) -> list[Cell]:
    """Reads all cells of a folder of results; warns of each file that is no cell, or has changed since it was written.

    Args:
      folder: the folder of results.
      set_aside: rename such a file to `….corrupt`, so that its cell counts as not yet run. A cell whose metrics or
        masks have changed then counts as not yet run, too.

    Returns:
      The cells that could be read, by file name. Those that version 0.1.0 wrote have no checksum; a warning says so.

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
    stored_cells = []
    for path in paths:
        stored = _read_or_warn(path, set_aside)
        if stored is not None:
            stored_cells.append(stored)
    _warn_of_unsealed(folder, stored_cells)
    _warn_of_missing_files(folder, stored_cells)
    return [stored.cell for stored in stored_cells if _counts(folder, stored, set_aside)]


def has_changed(folder: Path, cell_name: str, path: Path) -> bool:
    """Whether a file that belongs to a cell has changed since the cell was written; False if no cell names the file."""
    try:
        stored = _read_stored(_path_of(folder, cell_name))
    except (ValueError, OSError):
        return False
    digest = stored.checksums.get(path.relative_to(folder).as_posix())
    return digest is not None and _differs(path, digest)


class _Stored(NamedTuple):
    """A cell and what its file says besides."""

    cell: Cell
    path: Path
    is_sealed: bool
    checksums: dict[str, str]  # of the files that belong to the cell, by path in the folder


def _path_of(folder: Path, cell_name: str) -> Path:
    return folder / 'cells' / f'{cell_name}.json'


def _files_of(cell_name: str) -> tuple[str, ...]:
    """Lists what may lie in a folder of results beside a cell."""
    return f'metrics/{cell_name}.jsonl', f'masks/{cell_name}.npz'


def _read_or_warn(path: Path, set_aside: bool) -> _Stored | None:
    try:
        return _read_stored(path)
    except (ValueError, OSError) as error:
        outcome = 'it is left out; a sweep runs its cell again'
        if set_aside:
            outcome = f'it is now {_set_aside(path)}'
        warn(f'{path} is no result of this version: {error}; {outcome}')
        return None


def _read_stored(path: Path) -> _Stored:
    data = input_files.read_file(path)
    is_sealed = seals.is_sealed(data)
    content = input_files.parse_json(data)
    if not isinstance(content, dict):
        raise ValueError(f'it holds a {type(content).__name__}, not a JSON object')
    version = content.pop('version', None)
    if version not in (1, VERSION):
        raise ValueError(f'its version is {version!r}, not {VERSION}')
    is_current = version == VERSION
    _check_keys(content.keys(), is_current)
    if is_current and not is_sealed:
        raise ValueError('its checksum does not stand at its end')
    content.pop('checksum', None)
    checksums = content.pop('files', {})
    names = _files_of(path.stem)
    if not isinstance(checksums, dict) or not checksums.keys() <= set(names):
        raise ValueError(f'files must be {" or ".join(names)}, got {checksums!r}')
    cell = Cell(**content)
    if cell.name != path.stem:
        raise ValueError(f'it holds the cell {cell.name}')
    return _Stored(cell, path, is_sealed, checksums)


def _check_keys(keys: Any, is_current: bool) -> None:
    expected = _FIELDS.keys() - {'version'}
    if is_current:
        expected |= {'files', 'checksum'}
    for problem, names in (('lacks', expected - keys), ('has unknown', keys - expected)):
        if names:
            raise ValueError(f'it {problem} {", ".join(sorted(names))}')


def _counts(folder: Path, stored: _Stored, set_aside: bool) -> bool:
    """Whether a cell counts as run; warns of each of its files that has changed."""
    is_whole = True
    for name, digest in stored.checksums.items():
        path = folder / name
        if not _differs(path, digest):
            continue
        is_whole = False
        outcome = 'the result beside it is whole; a sweep runs its cell again'
        if set_aside:
            outcome = f'it is now {_set_aside(path)}, and its cell {stored.cell.name} runs again'
        warn(f'{path} has changed since it was written: its checksum does not match; {outcome}')
    if is_whole or not set_aside:
        return True
    _set_aside(stored.path)
    return False


def _differs(path: Path, digest: str) -> bool:
    """Whether a file is there and has another checksum."""
    if not path.exists():
        return False
    try:
        input_files.check_file(path)
        return seals.checksum(path) != digest
    except OSError:
        return True


def _set_aside(path: Path) -> str:
    new_path = path.with_name(f'{path.name}.corrupt')
    os.replace(path, new_path)
    return new_path.name


def _warn_of_unsealed(folder: Path, stored_cells: list[_Stored]) -> None:
    unsealed = [stored.path.name for stored in stored_cells if not stored.is_sealed]
    if unsealed:
        warn(
            f'{len(unsealed)} results in {folder} have no checksum, since version 0.1.0 wrote them ({unsealed[0]}): '
            'damage to them is not noticed; train them again into another folder if that matters'
        )


def _warn_of_missing_files(folder: Path, stored_cells: list[_Stored]) -> None:
    missing = []
    for stored in stored_cells:
        missing += [name for name in stored.checksums if not (folder / name).exists()]
    if missing:
        warn(
            f'{len(missing)} files that belong to results in {folder} are missing ({missing[0]}): the results count; '
            'to have a cell run again, remove its file in cells/'
        )


class _FieldRule(NamedTuple):
    """What a field of a cell may hold."""

    accepts: Callable[[Any], bool]
    description: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_file_name(value: Any) -> bool:
    return _is_text(value) and bool(re.fullmatch(r'[A-Za-z0-9_.-]+', value))


def _is_dict_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_dict(table: Any) -> bool:
        if not isinstance(table, dict):
            return False
        return all(map(_is_text, table)) and all(map(accepts, table.values()))

    return is_dict


_TEXT = _FieldRule(_is_text, 'a text that is not empty')
_COUNT = _FieldRule(_is_count, 'a whole number of at least 0')
_NUMBER = _FieldRule(_is_number, 'a number')
_SHARE = _FieldRule(_is_share, 'a number in [0, 1]')
_FILE_NAME = _FieldRule(_is_file_name, 'a text of letters without accents, digits, _, - or .')
_FIELDS = {
    'workload': _TEXT,
    'data': _TEXT,
    'algorithm': _FILE_NAME,
    'sparsity': _SHARE,
    'seed': _COUNT,
    'metric': _TEXT,
    'better': _FieldRule(lambda value: value in ('high', 'low'), "'high' or 'low'"),
    'value': _NUMBER,
    'metrics': _FieldRule(_is_dict_of(_is_number), 'a dict of numbers'),
    'reached': _SHARE,
    'layers': _FieldRule(_is_dict_of(_is_share), 'a dict of numbers in [0, 1]'),
    'steps': _COUNT,
    'seconds': _NUMBER,
    'recipe': _TEXT,
    'version': _FieldRule(lambda version: version == VERSION, str(VERSION)),
}
