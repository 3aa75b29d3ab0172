"""Texts in parts that are read alone: text files in mebibytes, parquet files in their row groups.

A token is a byte. C4 comes as parquet files with a column `text`; a line break separates documents.
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
    """A reader of text files, in parts of a size in bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / '1.txt').write_bytes(b'abcde')
    ...     parts = TextParts([Path(folder) / '1.txt'], size=3)
    ...     [part.tobytes() for part in parts]
    [b'abc', b'de']
    """

    def __init__(self, paths: list[Path], size: int = PART):
        self._size = size
        self._parts: list[tuple[Path, int]] = []
        for path in paths:
            for start in range(0, path.stat().st_size, size):
                self._parts.append((path, start))

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> np.ndarray:
        path, start = self._parts[index]
        try:
            with path.open('rb') as file:
                file.seek(start)
                return np.frombuffer(file.read(self._size), np.uint8)
        except OSError as error:
            raise DataError(f'{path} cannot be read ({error}): put it back') from error


class ParquetParts:
    """A reader of the column `text` of parquet files; a `DataError` where there is none."""

    def __init__(self, paths: list[Path]):
        self._parts: list[tuple[Path, int]] = []
        for path in paths:
            for group in range(_count_row_groups(path)):
                self._parts.append((path, group))

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> np.ndarray:
        path, group = self._parts[index]
        try:
            with _parquet().ParquetFile(path) as file:
                table = file.read_row_group(group, columns=[COLUMN])
                rows = table[COLUMN].to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(
                f'{path}, row group {group}, cannot be read ({error}): {DOWNLOAD_AGAIN}'
            ) from error
        return np.frombuffer(b'\n'.join(row.encode() for row in rows if row), np.uint8)


def read_corpus(folder: Path, test_bytes: int) -> Corpus:
    """Finds parquet or text files, and reads the beginning of the test part.

    Files in whose path is `validation` are for testing, others with `train` for training; where
    one of the two is missing a `DataError` says so.
    """
    for suffix, reader in (('.parquet', ParquetParts), ('.txt', TextParts)):
        train, test = _find_files(folder, suffix)
        if train and test:
            symbols = np.arange(256, dtype=np.uint8)
            return Corpus(reader(train), _read_beginning(reader(test), test_bytes), symbols)
    raise DataError(
        f'{folder} does not hold files *train*.parquet and *validation*.parquet, or *train*.txt '
        'and *validation*.txt: put both parts there'
    )


def _find_files(folder: Path, suffix: str) -> tuple[list[Path], list[Path]]:
    """The files for training and for testing."""
    train, test = [], []
    for path in sorted(folder.rglob(f'*{suffix}')):
        name = str(path.relative_to(folder))
        if 'validation' in name:
            test.append(path)
        elif 'train' in name:
            train.append(path)
    return train, test


def _read_beginning(parts: Reader[np.ndarray], size: int) -> np.ndarray:
    beginning = np.zeros(0, np.uint8)
    for index in range(len(parts)):
        if len(beginning) >= size:
            break
        beginning = np.concatenate([beginning, parts[index]])
    return beginning[:size]


def _count_row_groups(path: Path) -> int:
    try:
        with _parquet().ParquetFile(path) as file:
            names = file.schema_arrow.names
            count = file.num_row_groups
    except (OSError, ValueError) as error:
        raise DataError(
            f'{path} cannot be read as a parquet file ({error}): {DOWNLOAD_AGAIN}'
        ) from error
    if COLUMN not in names:
        raise DataError(f'{path} has the columns {names}: it needs one named {COLUMN!r}')
    return count


def _parquet() -> Any:
    return imported('pyarrow.parquet', 'parquet files')
