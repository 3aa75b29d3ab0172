"""Results on disk: one JSON file for each finished cell of a comparison, which is an algorithm, sparsity and seed.

A cell's file appears when it is whole, and holds checksums of itself and of what belongs to it. One that cannot be
read, or has changed since, is named and never taken for a result.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxpruner.core import atomic_files, input_files
from jaxpruner.core.caller_warnings import warn
from jaxpruner.report import seals

VERSION = 2  # 1 had no checksums


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
                raise ValueError(
                    f'{field.name} must be {wanted}, got {value!r} of type {type(value).__name__}'
                )

    @property
    def name(self) -> str:
        """The name of its files: algorithm, sparsity and seed."""
        return f'{self.algorithm}_{float(self.sparsity)}_{self.seed}'


def write_cell(folder: Path, cell: Cell) -> None:
    """Writes `cells/<name>.json` into a folder of results, which is made where it is missing.

    The file ends with a checksum, and holds those of the cell's metrics and masks that are there already.

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
    files = {
        name: seals.checksum(folder / name)
        for name in _files_of(cell.name)
        if (folder / name).is_file()
    }
    text = json.dumps(
        {'version': cell.version, **dataclasses.asdict(cell), 'files': files}, indent=1
    )
    path = folder / 'cells' / f'{cell.name}.json'
    atomic_files.replace_file(path, lambda temporary: temporary.write_bytes(seals.seal(text)))


def read_cells(folder: Path, set_aside: bool = False) -> list[Cell]:
    """Reads all cells of a folder of results; warns of each file that is none, or has changed since it was written.

    Args:
      folder: the folder of results.
      set_aside: also rename such a file to `….corrupt`, so that its cell counts as not yet run. A cell whose metrics or
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
    stored = [found for path in paths if (found := _read_or_warn(path, set_aside)) is not None]
    _warn_of_old(folder, [found for found in stored if not found.is_sealed])
    _warn_of_missing(
        folder, [name for found in stored for name in found.files if not (folder / name).exists()]
    )
    return [found.cell for found in stored if _check_files(folder, found, set_aside)]


def has_changed(folder: Path, cell_name: str, path: Path) -> bool:
    """Says whether a file that belongs to a cell has changed since; of one that no cell speaks of this is not known.

    Args:
      folder: the folder of results.
      cell_name: as `Cell.name`.
      path: the file.

    >>> has_changed(Path('no such folder'), 'rigl_0.8_0', Path('a'))
    False
    """
    try:
        stored = _read_cell(folder / 'cells' / f'{cell_name}.json')
    except (ValueError, OSError):
        return False
    digest = stored.files.get(path.relative_to(folder).as_posix())
    return digest is not None and _has_changed(path, digest)


class _Stored(NamedTuple):
    """What a file says."""

    cell: Cell
    path: Path
    is_sealed: bool
    files: dict[
        str, str
    ]  # checksums of files that belong to the cell, by their paths in the folder


def _read_or_warn(path: Path, set_aside: bool) -> _Stored | None:
    try:
        return _read_cell(path)
    except (ValueError, OSError) as error:
        done = (
            f'it is now {_set_aside(path)}'
            if set_aside
            else 'it is left out; a sweep runs its cell again'
        )
        warn(f'{path} is no result of this version: {error}; {done}')
        return None


def _read_cell(path: Path) -> _Stored:
    data = input_files.read_file(path)
    is_sealed = seals.is_sealed(data)
    content = input_files.parse_json(data)
    if not isinstance(content, dict):
        raise ValueError(f'it holds no table of keys but {type(content).__name__}')
    version = content.get('version')
    if version not in (1, VERSION):
        raise ValueError(f'its version is {version!r}, not {VERSION}')
    expected = _FIELDS.keys() | ({'files', 'checksum'} if version == VERSION else set())
    for problem, keys in (
        ('lacks', expected - content.keys()),
        ('has unknown', content.keys() - expected),
    ):
        if keys:
            raise ValueError(f'it {problem} {", ".join(sorted(keys))}')
    if version == VERSION and not is_sealed:
        raise ValueError('its checksum does not stand at its end')
    files = content.get('files', {})
    if not (isinstance(files, dict) and files.keys() <= set(_files_of(path.stem))):
        raise ValueError(f'files must be {" or ".join(_files_of(path.stem))}, got {files!r}')
    fields = {name: content[name] for name in _FIELDS if name != 'version'}
    cell = Cell(**fields)
    if cell.name != path.stem:
        raise ValueError(f'it holds the cell {cell.name}')
    return _Stored(cell, path, is_sealed, files)


def _files_of(name: str) -> tuple[str, ...]:
    """What lies in a folder of results beside a cell."""
    return f'metrics/{name}.jsonl', f'masks/{name}.npz'


def _check_files(folder: Path, stored: _Stored, set_aside: bool) -> bool:
    """Warns of files of a cell that have changed; says whether the cell counts."""
    changed = [
        folder / name
        for name, digest in stored.files.items()
        if _has_changed(folder / name, digest)
    ]
    for path in changed:
        done = 'the result beside it is whole; a sweep runs its cell again'
        if set_aside:
            done = f'it is now {_set_aside(path)}, and its cell {stored.cell.name} runs again'
        warn(f'{path} has changed since it was written: its checksum does not match; {done}')
    if changed and set_aside:
        _set_aside(stored.path)
    return not (changed and set_aside)


def _has_changed(path: Path, digest: str) -> bool:
    if not path.exists():
        return False
    try:
        input_files.check_file(path)
        return seals.checksum(path) != digest
    except OSError:
        return True


def _set_aside(path: Path) -> str:
    aside = path.with_name(f'{path.name}.corrupt')
    os.replace(path, aside)
    return aside.name


def _warn_of_old(folder: Path, old: list[_Stored]) -> None:
    if old:
        warn(
            f'{len(old)} results in {folder} have no checksum, since version 0.1.0 wrote them ({old[0].path.name}): '
            'damage to them is not noticed; train them again into another folder if that matters'
        )


def _warn_of_missing(folder: Path, missing: list[str]) -> None:
    if missing:
        warn(
            f'{len(missing)} files that belong to results in {folder} are missing ({missing[0]}): the results count; '
            'to have a cell run again, remove its file in cells/'
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_table_of(fits: Any) -> Any:
    return lambda table: (
        isinstance(table, dict)
        and all(_is_text(key) and fits(value) for key, value in table.items())
    )


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
