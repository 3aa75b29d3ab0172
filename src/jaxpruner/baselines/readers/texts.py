"""Texts in parts that are read alone: text files in pieces of a mebibyte, parquet files in their row groups.

A token is a byte. C4 comes as parquet files with a column `text`; documents follow one another behind a line break.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.baselines.data import DOWNLOAD_AGAIN, DataError
from jaxpruner.baselines.readers.optional_packages import imported
from jaxpruner.baselines.readers.pipelines import Reader

PART = 2**20  # bytes of a text file that are read at once
COLUMN = 'text'


class Corpus(NamedTuple):
    """A text whose training part stays on disk."""

    train: Reader[np.ndarray]  # parts, uint8[bytes]
    test: np.ndarray  # uint8[n]
    symbols: np.ndarray  # uint8[256]: every byte may occur


class TextParts:
    """A reader of text files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / '1.txt').write_bytes(b'abcde')
    ...     parts = TextParts([Path(folder) / '1.txt'], size=3)
    ...     [part.tobytes() for part in parts]
    [b'abc', b'de']
    """

    def __init__(self, paths: list[Path], size: int = PART):
        """Looks at the sizes of the files."""
        self._size = size
        self._places = [
            (path, start) for path in paths for start in range(0, path.stat().st_size, size)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> np.ndarray:
        path, start = self._places[index]
        try:
            with path.open('rb') as file:
                file.seek(start)
                return np.frombuffer(file.read(self._size), np.uint8)
        except OSError as error:
            raise DataError(f'{path} cannot be read ({error}): put it back') from error


class ParquetParts:
    """A reader of the column `text` of parquet files."""

    def __init__(self, paths: list[Path]):
        """Reads where row groups lie."""
        self._places = [(path, group) for path in paths for group in range(_row_groups(path))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> np.ndarray:
        path, group = self._places[index]
        try:
            with _parquet().ParquetFile(path) as file:
                rows = file.read_row_group(group, columns=[COLUMN])[COLUMN].to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(
                f'{path}, row group {group}, cannot be read ({error}): {DOWNLOAD_AGAIN}'
            ) from error
        return np.frombuffer(b'\n'.join(row.encode() for row in rows if row), np.uint8)


def read_corpus(folder: Path, test_bytes: int) -> Corpus:
    """Finds the files, and reads the beginning of the test part."""
    for suffix, reader in (('.parquet', ParquetParts), ('.txt', TextParts)):
        found = {part: _files(folder, part, suffix) for part in ('train', 'validation')}
        if all(found.values()):
            return Corpus(
                reader(found['train']),
                _beginning(reader(found['validation']), test_bytes),
                _SYMBOLS,
            )
    raise DataError(
        f'{folder} does not hold files *train*.parquet and *validation*.parquet, or *train*.txt and *validation*.txt: '
        'put both parts there'
    )


_SYMBOLS = np.arange(256, dtype=np.uint8)


def _files(folder: Path, part: str, suffix: str) -> list[Path]:
    paths = sorted(folder.rglob(f'*{suffix}'))
    kinds = {
        path: 'validation' if 'validation' in str(path.relative_to(folder)) else 'train'
        for path in paths
    }
    return [path for path in paths if kinds[path] == part and part in str(path.relative_to(folder))]


def _beginning(parts: Reader[np.ndarray], size: int) -> np.ndarray:
    read: list[np.ndarray] = []
    for index in range(len(parts)):
        if sum(map(len, read)) >= size:
            break
        read.append(parts[index])
    return np.concatenate([np.zeros(0, np.uint8), *read])[:size]


def _row_groups(path: Path) -> int:
    try:
        with _parquet().ParquetFile(path) as file:
            names, groups = file.schema_arrow.names, file.num_row_groups
    except (OSError, ValueError) as error:
        raise DataError(
            f'{path} cannot be read as a parquet file ({error}): {DOWNLOAD_AGAIN}'
        ) from error
    if COLUMN not in names:
        raise DataError(f'{path} has the columns {names}: it needs one named {COLUMN!r}')
    return groups


def _parquet() -> Any:
    return imported('pyarrow.parquet', 'parquet files')
