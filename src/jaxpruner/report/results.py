"""Results on disk: one JSON file for each finished cell of a comparison, which is one algorithm, sparsity and seed.

A cell's file appears when it is complete, and holds a checksum of itself. A file that cannot be read, or
has changed since it was written, is named in a warning and does not count as a result.
"""

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Literal

from jaxpruner.caller_warnings import warn
from jaxpruner.files import atomic_files, input_files

VERSION = 2  # 1 had no checksums
_CHECKSUM, _END = b' "checksum": "', b'"\n}\n'


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of training one workload with one algorithm, sparsity and seed.

    Numbers are Python's own. A metric may be NaN, for instance if training diverged: the file then says `NaN`, which
    Python reads back.

    Raises:
      ValueError: a sparsity is not in [0, 1], `better` is another word, or no file could have the algorithm's name.

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

    def __post_init__(self):
        shares = {'sparsity': self.sparsity, 'reached': self.reached, **self.layers}
        for name, share in shares.items():
            if not (isinstance(share, int | float) and 0 <= share <= 1):
                raise ValueError(f'{name} must be a number in [0, 1], got {share!r}')
        if self.better not in ('high', 'low'):
            raise ValueError(f"better must be 'high' or 'low', got {self.better!r}")
        if not re.fullmatch('[A-Za-z0-9_.-]+', self.algorithm):
            raise ValueError(
                f'algorithm must be letters without accents, digits, _, - or ., got {self.algorithm!r}'
            )

    @property
    def name(self) -> str:
        """The name of its files: algorithm, sparsity and seed."""
        return f'{self.algorithm}_{float(self.sparsity)}_{self.seed}'


def write_cell(folder: Path, cell: Cell) -> None:
    """Writes `cells/<name>.json` into a folder of results, which is made where it is missing.

    The file ends with a checksum of itself.

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
    content = {'version': VERSION, **dataclasses.asdict(cell)}
    head = json.dumps(content, indent=1).removesuffix('\n}').encode() + b',\n'
    sealed = head + _CHECKSUM + _digest(head).encode() + _END
    path = Path(folder) / 'cells' / f'{cell.name}.json'
    atomic_files.replace_file(path, lambda temporary: temporary.write_bytes(sealed))


def read_cells(folder: Path, set_aside: bool = False) -> list[Cell]:
    """Reads all cells of a folder of results; warns of each file that is no cell, or has changed since it was written.

    Args:
      folder: the folder of results.
      set_aside: rename such a file to `….corrupt`, so that its cell counts as not yet run.

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
    paths = sorted(folder.glob('cells/[!.]*.json'))
    if not paths:
        raise FileNotFoundError(f'no results in {folder}: looked for {folder / "cells" / "*.json"}')
    cells = []
    for path in paths:
        try:
            cells.append(_read(path))
        except (ValueError, TypeError, OSError) as error:
            outcome = 'it is left out; a sweep runs its cell again'
            if set_aside:
                outcome = f'it is now {path.name}.corrupt, and its cell runs again'
                os.replace(path, path.with_name(f'{path.name}.corrupt'))
            warn(f'{path} is no result of this version: {error}; {outcome}')
    return cells


def _read(path: Path) -> Cell:
    """Reads a cell; whatever else the file may hold, its own checksum says."""
    data = input_files.read_file(path)
    head, _, checksum = data.rpartition(_CHECKSUM)
    if checksum != _digest(head).encode() + _END:
        raise ValueError('its checksum does not match: it has changed since it was written')
    content = json.loads(data)
    del content['checksum']
    content.pop('files', None)  # earlier releases wrote checksums of masks
    version = content.pop('version')
    if version != VERSION:
        raise ValueError(f'its version is {version!r}, not {VERSION}')
    cell = Cell(**content)
    if cell.name != path.stem:
        raise ValueError(f'it holds the cell {cell.name}')
    return cell


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
