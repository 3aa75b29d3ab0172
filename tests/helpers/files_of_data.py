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


def varint(number):
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + varint(number // 128)


def field(number, content):
    """A field of a protocol buffer whose content has a length."""
    return bytes([number * 8 + 2]) + varint(len(content)) + content


def example(**features):
    """A tf.train.Example."""
    pairs = b''
    for name, value in features.items():
        one = (
            field(1, field(1, value))
            if isinstance(value, bytes)
            else field(3, field(1, varint(value)))
        )
        pairs += field(1, field(1, name.encode()) + field(2, one))
    return field(1, pairs)


def write_records(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), 'group_size:1')
    for record in records:
        writer.write(record)
    writer.close()


def image_records(folder, train=6, test=3):
    random = np.random.default_rng(0)
    for part, number, files in (('train', train, 2), ('validation', test, 1)):
        for file in range(files):
            records = [
                example(file_name=b'1.JPEG', image=picture(random, index % 2), label=index % 2)
                for index in range(number)
            ]
            write_records(
                folder / f'imagenet2012-{part}.array_record-0000{file}-of-0000{files}', records
            )


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
