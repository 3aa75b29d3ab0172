"""EMNIST by its writers: the files of FedJAX (SQLite) and TensorFlow Federated (HDF5), by client.

FedJAX has a table `federated_data` of client_id, data and num_examples, where data is zlib over
msgpack; TensorFlow Federated has groups `examples/<client>` with `pixels` and `label`. In both,
pixels are float32 from 0 (ink) to 1.
"""

import sqlite3
import zlib
from contextlib import closing
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
    """A reader of a file as FedJAX has it; a `DataError` where it is missing or damaged."""

    def __init__(self, path: Path):
        self._path = path
        query = 'SELECT client_id FROM federated_data ORDER BY client_id'
        try:
            rows = self._rows(query)
        except sqlite3.Error as error:
            raise _unreadable(path, error) from error
        self._names = [row[0] for row in rows]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Client:
        msgpack = imported('msgpack', "FedJAX's files")
        name = self._names[index]
        query = 'SELECT data FROM federated_data WHERE client_id = ?'
        errors = sqlite3.Error, zlib.error, ValueError, KeyError, TypeError
        try:
            ((compressed,),) = self._rows(query, name)
            packed = zlib.decompress(compressed)
            fields = msgpack.unpackb(packed, ext_hook=_array, raw=False)
            return _client(fields['pixels'], fields['label'])
        except (*errors, msgpack.UnpackException) as error:
            raise _unreadable(f'{self._path}, client {name!r},', error) from error

    def _rows(self, query: str, *values: Any) -> list[Any]:
        """Opens the file anew each time: threads cannot share a connection, nor close another's."""
        uri = f'{self._path.absolute().as_uri()}?mode=ro'
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return connection.execute(query, values).fetchall()


class Hdf5Clients:
    """A reader of a file as TensorFlow Federated has it; `DataError` where missing or damaged."""

    def __init__(self, path: Path):
        self._path = path
        h5py = imported('h5py', "TensorFlow Federated's files")
        try:
            self._examples = h5py.File(path, 'r')['examples']
        except (OSError, KeyError) as error:
            raise _unreadable(path, error) from error
        self._names = sorted(self._examples)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Client:
        name = self._names[index]
        try:
            fields = self._examples[name]
            return _client(fields['pixels'][()], fields['label'][()])
        except (OSError, KeyError, ValueError) as error:
            raise _unreadable(f'{self._path}, client {name!r},', error) from error


_READERS = {'federated_emnist_{}.sqlite': SqliteClients, 'fed_emnist_{}.h5': Hdf5Clients}


def read_emnist(folder: Path) -> ClientFiles:
    """Finds the training and test files of FedJAX or of TensorFlow Federated; reads the test part."""
    pairs = []
    for name, reader in _READERS.items():
        train = folder / name.format('train')
        test = folder / name.format('test')
        if train.is_file() and test.is_file():
            train_clients = reader(train)
            test_clients = reader(test)
            clients = [test_clients[index] for index in range(len(test_clients))]
            images = np.concatenate([client.images for client in clients])
            labels = np.concatenate([client.labels for client in clients])
            return ClientFiles(train_clients, images, labels)
        pairs.append(f'{train.name} and {test.name}')
    raise DataError(f'{folder} holds neither {" nor ".join(pairs)}: put one pair there')


def _client(pixels: Any, labels: Any) -> Client:
    pixels = np.asarray(pixels, np.float32)
    labels = np.asarray(labels, np.int32).reshape(-1)
    if pixels.ndim != 3 or len(pixels) != len(labels) or not len(labels):
        raise ValueError(f'{pixels.shape} pixels and {len(labels)} labels do not belong together')
    return Client(1 - pixels[..., None], labels)


def _array(extension: int, data: bytes) -> np.ndarray:
    if extension != _NDARRAY:
        raise ValueError(f'extension type {extension} where an array belongs')
    msgpack = imported('msgpack', "FedJAX's files")
    shape, dtype_name, content = msgpack.unpackb(data, raw=True)
    dtype = np.dtype(dtype_name.decode())
    return np.frombuffer(content, dtype).reshape(shape)


def _unreadable(what: Path | str, error: Exception) -> DataError:
    return DataError(f'{what} cannot be read ({error}): {DOWNLOAD_AGAIN}')
