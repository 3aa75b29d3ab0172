"""EMNIST by its writers: the files of FedJAX (SQLite) and of TensorFlow Federated (HDF5), read client by client.

FedJAX has a table `federated_data` of client_id, data and num_examples, where data is zlib over msgpack; TensorFlow
Federated has groups `examples/<client>` with `pixels` and `label`. In both, pixels are float32 from 0 (ink) to 1.
"""

import sqlite3
import threading
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.baselines.data import DOWNLOAD_AGAIN, DataError
from jaxpruner.baselines.readers.optional_packages import imported
from jaxpruner.baselines.readers.pipelines import Reader

_NDARRAY = 1  # the number that FedJAX gives to arrays among msgpack's extension types


class Client(NamedTuple):
    """What one writer wrote."""

    images: np.ndarray  # float32[n, 28, 28, 1], 0 where there is no ink
    labels: np.ndarray  # int32[n], 0 to 61: digits, capitals, small letters


class ClientFiles(NamedTuple):
    """The clients, and all that is for testing."""

    clients: Reader[Client]
    x_test: np.ndarray  # float32[tests, 28, 28, 1]
    y_test: np.ndarray  # int32[tests]


class SqliteClients:
    """A reader of a file as FedJAX has it."""

    def __init__(self, path: Path):
        """Lists the clients."""
        self._path, self._local = path, threading.local()
        try:
            rows = (
                self._connection()
                .execute('SELECT client_id FROM federated_data ORDER BY client_id')
                .fetchall()
            )
        except sqlite3.Error as error:
            raise DataError(f'{path} cannot be read ({error}): {DOWNLOAD_AGAIN}') from error
        self._names = [row[0] for row in rows]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Client:
        msgpack = imported('msgpack', "FedJAX's files")
        name = self._names[index]
        try:
            query = 'SELECT data FROM federated_data WHERE client_id = ?'
            (data,) = self._connection().execute(query, [name]).fetchone()
            found = msgpack.unpackb(zlib.decompress(data), ext_hook=_array, raw=False)
            return _client(found['pixels'], found['label'])
        except (
            sqlite3.Error,
            zlib.error,
            ValueError,
            KeyError,
            TypeError,
            msgpack.UnpackException,
        ) as error:
            raise DataError(
                f'{self._path}, client {name!r}, cannot be read ({error}): {DOWNLOAD_AGAIN}'
            ) from error

    def _connection(self) -> sqlite3.Connection:
        """One for each thread."""
        if not hasattr(self._local, 'connection'):
            self._local.connection = sqlite3.connect(
                f'{self._path.absolute().as_uri()}?mode=ro', uri=True
            )
        return self._local.connection


class Hdf5Clients:
    """A reader of a file as TensorFlow Federated has it."""

    def __init__(self, path: Path):
        """Lists the clients."""
        self._path = path
        try:
            self._examples = imported('h5py', "TensorFlow Federated's files").File(path, 'r')[
                'examples'
            ]
        except (OSError, KeyError) as error:
            raise DataError(f'{path} cannot be read ({error}): {DOWNLOAD_AGAIN}') from error
        self._names = sorted(self._examples)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Client:
        name = self._names[index]
        try:
            return _client(self._examples[name]['pixels'][()], self._examples[name]['label'][()])
        except (OSError, KeyError, ValueError) as error:
            raise DataError(
                f'{self._path}, client {name!r}, cannot be read ({error}): {DOWNLOAD_AGAIN}'
            ) from error


def read_emnist(folder: Path) -> ClientFiles:
    """Finds the files and reads the test part."""
    for name, reader in _READERS.items():
        paths = [folder / name.format(part) for part in ('train', 'test')]
        if all(path.is_file() for path in paths):
            train, test = map(reader, paths)
            everything = [test[index] for index in range(len(test))]
            return ClientFiles(train, *map(np.concatenate, zip(*everything, strict=True)))
    pairs = [f'{name.format("train")} and {name.format("test")}' for name in _READERS]
    raise DataError(f'{folder} holds neither {" nor ".join(pairs)}: put one pair there')


_READERS = {'federated_emnist_{}.sqlite': SqliteClients, 'fed_emnist_{}.h5': Hdf5Clients}


def _client(pixels: Any, labels: Any) -> Client:
    pixels, labels = np.asarray(pixels, np.float32), np.asarray(labels, np.int32).reshape(-1)
    if pixels.ndim != 3 or len(pixels) != len(labels) or not len(labels):
        raise ValueError(f'{pixels.shape} pixels and {len(labels)} labels do not belong together')
    return Client(1 - pixels[..., None], labels)


def _array(kind: int, data: bytes) -> np.ndarray:
    if kind != _NDARRAY:
        raise ValueError(f'extension type {kind} where an array belongs')
    shape, dtype, content = imported('msgpack', "FedJAX's files").unpackb(data, raw=True)
    return np.frombuffer(content, np.dtype(dtype.decode())).reshape(shape)
