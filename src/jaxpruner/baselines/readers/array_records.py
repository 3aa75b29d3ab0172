"""Pictures in array-record files as TensorFlow Datasets writes them.

Each record is a `tf.train.Example` with the features `image` (the bytes of a JPEG or PNG file) and
`label` (a whole number); TensorFlow is not needed to read it.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner.baselines.data import DOWNLOAD_AGAIN, DataError
from jaxpruner.baselines.readers.optional_packages import imported
from jaxpruner.baselines.readers.pictures import Picture

_USE = 'array-record files'


class ArrayRecords:
    """A reader of the pictures in array-record files."""

    def __init__(self, paths: Sequence[Path]):
        """Counts the records; a `DataError` for a file that is missing or of another kind."""
        self._paths = list(paths)
        self._sources = [_opened(path) for path in self._paths]
        lengths = [len(source) for source in self._sources]
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Picture:
        file = int(np.searchsorted(self._ends, index, side='right'))
        source = self._sources[file]
        record = index - int(self._ends[file]) + len(source)
        name = f'{self._paths[file]}, record {record}'
        try:
            features = _parse_example(source[record])
        except Exception as error:  # array_record and protobuf have their own
            raise DataError(f'{name} cannot be read ({error}): {DOWNLOAD_AGAIN}') from error
        try:
            (content,) = features['image']
            (label,) = features['label']
        except (KeyError, ValueError):
            raise DataError(
                f"{name} has the features {sorted(features)}; it needs one 'image' (a file's "
                "bytes) and one 'label'"
            ) from None
        return Picture(name, content, label)


def _parse_example(record: bytes) -> dict[str, list[Any]]:
    """The features of a `tf.train.Example`: bytes and whole numbers."""
    features = {}
    for entry in _example().FromString(record).features.feature:
        contents = entry.value.bytes_list.value
        numbers = entry.value.int64_list.value
        features[entry.key] = [*contents, *numbers]
    return features


def _opened(path: Path) -> Any:
    module = imported('array_record.python.array_record_data_source', _USE)
    try:
        return module.ArrayRecordDataSource(str(path))
    except Exception as error:  # a RuntimeError or ValueError of the C++ library
        raise DataError(
            f'{path} cannot be read as an array-record file ({error}): {DOWNLOAD_AGAIN}'
        ) from error


@functools.cache
def _example() -> Any:
    """The message, described by hand; a map is, in bytes, a list of pairs."""
    descriptors = imported('google.protobuf.descriptor_pb2', _USE)
    field = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name='example.proto', package='example')

    def message(name, *fields):
        described = file.message_type.add(name=name)
        for title, number, is_repeated, field_type in fields:
            added = described.field.add(name=title, number=number)
            added.label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            if isinstance(field_type, str):
                added.type = field.TYPE_MESSAGE
                added.type_name = f'.example.{field_type}'
            else:
                added.type = field_type

    message('Bytes', ('value', 1, True, field.TYPE_BYTES))
    message('Integers', ('value', 1, True, field.TYPE_INT64))
    message('Feature', ('bytes_list', 1, False, 'Bytes'), ('int64_list', 3, False, 'Integers'))
    message('Pair', ('key', 1, False, field.TYPE_STRING), ('value', 2, False, 'Feature'))
    message('Features', ('feature', 1, True, 'Pair'))
    message('Example', ('features', 1, False, 'Features'))
    pool = imported('google.protobuf.descriptor_pool', _USE).DescriptorPool()
    pool.Add(file)
    described = pool.FindMessageTypeByName('example.Example')
    return imported('google.protobuf.message_factory', _USE).GetMessageClass(described)
