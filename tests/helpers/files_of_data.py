"""Tiny files in the formats of large data sets, written without the code that reads them."""

import io
import sqlite3
import zlib

import msgpack
import numpy as np
from PIL import Image


def picture(random, label, size=(12, 10)):
    """A JPEG file of noise, darker for label 0."""
    pixels = random.integers(0, 90, (*size, 3)) + 160 * label
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, 'JPEG')
    return file.getvalue()


def image_folder(folder, train=6, test=3):
    random = np.random.default_rng(0)
    for part, number in (('train', train), ('val', test)):
        for label, name in enumerate(('ant', 'bee')):
            (folder / part / name).mkdir(parents=True)
            for index in range(number):
                (folder / part / name / f'{name}_{index}.JPEG').write_bytes(picture(random, label))


def writers(random, clients=4):
    """EMNIST's: pixels are 1 where there is no ink, and clients have different numbers of examples."""
    for client in range(clients):
        labels = random.integers(0, 62, 3 + client).astype(np.int32)
        yield f'f{client:04d}_00', random.random((3 + client, 28, 28)).astype(np.float32), labels


def packed(array):
    return msgpack.ExtType(
        1, msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True)
    )


def fedjax_clients(folder):
    random = np.random.default_rng(0)
    for part in ('train', 'test'):
        connection = sqlite3.connect(folder / f'federated_emnist_{part}.sqlite')
        connection.execute(
            'CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, '
            'num_examples INTEGER NOT NULL)'
        )
        for name, pixels, labels in writers(random):
            data = zlib.compress(msgpack.packb({'pixels': packed(pixels), 'label': packed(labels)}))
            connection.execute(
                'INSERT INTO federated_data VALUES (?, ?, ?)', [name.encode(), data, len(labels)]
            )
        connection.commit()
        connection.close()


TEXT = [f'document {number} says {number * number}; and again, {number}' for number in range(60)]


def parquet_files(folder, column='text'):
    import pyarrow
    from pyarrow import parquet

    for part in ('train', 'validation'):
        (folder / part).mkdir()
        table = pyarrow.table({column: TEXT, 'url': ['nowhere'] * len(TEXT)})
        parquet.write_table(table, folder / part / '0000.parquet', row_group_size=20)
