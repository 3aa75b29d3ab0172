"""Readers of data that stay on disk: images, texts and clients, each by the format of its files.

A reader is a sequence whose items are read when they are asked for; `mixed`, `numbered`, `windows` and `in_order` make
feeds of readers with grain. All need the extra `readers`.
"""

import functools
import importlib
import io
import json
import math
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxpruner.baselines.data import DOWNLOAD_AGAIN, DataError
from jaxpruner.baselines.task import Values


def imported(name: str, use: str) -> Any:
    """Imports a module, or says which package its use needs.

    >>> imported('no_such_module', 'numbers')
    Traceback (most recent call last):
    ...
    ImportError: numbers need no_such_module, which is not installed: pip install 'jaxpruner[readers]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition('.')[0]
        raise ImportError(
            f"{use} need {package}, which is not installed: pip install 'jaxpruner[readers]'"
        ) from error


_THREADS = 16
_BATCHES_AHEAD = 2
_POOL = 16  # parts of a text whose windows are mixed
_STATE = 'position.json'
_EPOCHS = 2**20  # more than anyone waits for; without a number lengths no longer fit into 64 bits
Item = TypeVar('Item', covariant=True)


class Reader(Protocol[Item]):
    """A sequence whose items are read when they are asked for, by several threads at once."""

    def __len__(self) -> int:
        """How many items there are."""
        ...

    def __getitem__(self, index: int, /) -> Item:
        """Reads one."""
        ...


class GrainFeed:
    """A feed of what a grain dataset yields; its position is that of the dataset's iterator."""

    def __init__(self, dataset: Any):
        self._iterator = iter(dataset)

    def next(self, values: Values | None) -> Any:
        del values
        return next(self._iterator)

    def save(self, folder: Path) -> None:
        text = json.dumps(self._iterator.get_state())
        (folder / _STATE).write_text(text)

    def restore(self, folder: Path) -> None:
        text = (folder / _STATE).read_text()
        self._iterator.set_state(json.loads(text))

    def close(self) -> None:
        self._iterator.close()


def mixed(
    reader: Reader[Any],
    prepare: Callable[[np.random.Generator, Any], Any],
    batch_size: int,
    seed: int,
) -> GrainFeed:
    """All examples in a random order, again and again in another.

    `prepare` makes an example, a pytree of arrays, of random numbers of its own and an item.

    >>> feed = mixed([1, 2, 3], lambda random, item: np.float32(item), batch_size=3, seed=0)
    >>> sorted(feed.next(None).tolist())
    [1.0, 2.0, 3.0]
    """

    def prepare_item(index, item):
        random = np.random.default_rng((seed, index))
        return prepare(random, item)

    shuffled = _grain().MapDataset.source(reader).shuffle(seed=seed)
    examples = shuffled.repeat(_EPOCHS).map_with_index(prepare_item)
    return GrainFeed(_read_ahead(examples, batch_size))


def numbered(make: Callable[[int], Any]) -> GrainFeed:
    """Batches that are made from their numbers.

    >>> feed = numbered(lambda number: np.full(2, number))
    >>> feed.next(None).tolist(), feed.next(None).tolist()
    ([0, 0], [1, 1])
    """
    grain = _grain()
    options = grain.ReadOptions(num_threads=_BATCHES_AHEAD, prefetch_buffer_size=_BATCHES_AHEAD)
    batches = grain.MapDataset.range(2**31 - 1).map(make)
    return GrainFeed(batches.to_iter_dataset(options))


def windows(parts: Reader[np.ndarray], length: int, batch_size: int, seed: int) -> GrainFeed:
    """Pieces of texts, of `length` bytes each: those of a few random parts are mixed at a time.

    What is left at a part's end is not used.

    >>> windows([np.arange(7, dtype=np.uint8)], length=3, batch_size=2, seed=0).next(None).shape
    (2, 3)
    """
    grain = _grain()

    class Windows(grain.experimental.FlatMapTransform):
        max_fan_out = 2**31

        def flat_map(self, element: np.ndarray) -> np.ndarray:
            return element

    def pool(number, texts):
        pieces = []
        for text in texts:
            complete = text[: len(text) // length * length]
            pieces.append(complete.reshape(-1, length))
        all_pieces = np.concatenate(pieces)
        if not len(all_pieces):
            raise ValueError(
                f'{len(texts)} parts of the text are all shorter than {length} bytes: use longer '
                'files'
            )
        random = np.random.default_rng((seed, number))
        return random.permutation(all_pieces)

    size = min(_POOL, len(parts))  # more would have a part twice
    shuffled = grain.MapDataset.source(parts).shuffle(seed=seed).repeat(_EPOCHS)
    pools = shuffled.batch(size, batch_fn=list).map_with_index(pool)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    pieces = grain.experimental.FlatMapIterDataset(pools.to_iter_dataset(options), Windows())
    return GrainFeed(pieces.batch(batch_size))


def in_order(reader: Reader[Any], prepare: Callable[[Any], Any], batch_size: int) -> Iterator[Any]:
    """All examples once; the last batch may be shorter.

    >>> [batch.tolist() for batch in in_order([1, 2, 3], np.float32, batch_size=2)]
    [[1.0, 2.0], [3.0]]
    """
    examples = _grain().MapDataset.source(reader).map(prepare)
    yield from _read_ahead(examples, batch_size)


def _read_ahead(examples: Any, batch_size: int) -> Any:
    options = _grain().ReadOptions(
        num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD * batch_size
    )
    return examples.to_iter_dataset(options).batch(batch_size)


def _grain() -> Any:
    return imported('grain', 'data that are read from disk')


Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels
MARGIN = 256 / 224  # of the shorter side when testing: what is cut off was seen in training, larger
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's red, green and blue, in [0, 1]
DEVIATION = (0.229, 0.224, 0.225)
_AREA = 0.08, 1.0  # share of the picture that a random part has
_RATIO = 3 / 4, 4 / 3  # of its width to its height
_TRIES = 10


class Picture(NamedTuple):
    """A picture as it lies on disk."""

    name: str  # of the file, and of the record in it; for errors
    content: bytes  # JPEG, PNG and what else pillow reads
    label: int


def random_part(random: np.random.Generator, picture: Picture, size: int) -> dict[str, Any]:
    """A random part, half of the time mirrored: `image` uint8[size, size, 3], `label` int32.

    As Szegedy et al. 2015 (https://arxiv.org/abs/1409.4842); a damaged picture is a `DataError`.
    """
    image = _decoded(picture)
    box = random_box(random, *image.size)
    pixels = _resized(image, box, size)
    if random.random() < 0.5:
        pixels = pixels[:, ::-1]
    return {'image': pixels, 'label': np.int32(picture.label)}


def middle(picture: Picture, size: int) -> dict[str, Any]:
    """The square in the middle, without a margin, as of `random_part`."""
    image = _decoded(picture)
    box = middle_box(*image.size)
    pixels = _resized(image, box, size)
    return {'image': pixels, 'label': np.int32(picture.label)}


def random_box(random: np.random.Generator, width: int, height: int) -> Box:
    """A part with a random area and ratio; the middle where none of a few fits.

    >>> random_box(np.random.default_rng(0), 1000, 1)
    (499.33..., 0.0, 500.66..., 1.0)
    """
    narrowest = math.log(_RATIO[0])
    widest = math.log(_RATIO[1])
    for _ in range(_TRIES):
        area = random.uniform(*_AREA) * width * height
        ratio = math.exp(random.uniform(narrowest, widest))
        wide = round(math.sqrt(area * ratio))
        high = round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = int(random.integers(width - wide + 1))
            upper = int(random.integers(height - high + 1))
            return left, upper, left + wide, upper + high
    wide = min(width, height * _RATIO[1])
    high = min(height, width / _RATIO[0])
    return _centered(width, height, wide, high)


def middle_box(width: int, height: int) -> Box:
    """The square in the middle without its margin.

    >>> middle_box(256, 512)
    (16.0, 144.0, 240.0, 368.0)
    """
    side = min(width, height) / MARGIN
    return _centered(width, height, side, side)


def _centered(width: int, height: int, wide: float, high: float) -> Box:
    left = (width - wide) / 2
    right = (width + wide) / 2
    upper = (height - high) / 2
    lower = (height + high) / 2
    return left, upper, right, lower


def _decoded(picture: Picture) -> Any:
    module = imported('PIL.Image', 'images')
    errors = OSError, SyntaxError, ValueError, module.DecompressionBombError
    try:
        image = module.open(io.BytesIO(picture.content))
        return image.convert('RGB')
    except errors as error:
        raise DataError(
            f'{picture.name} cannot be read as an image ({error}): {DOWNLOAD_AGAIN}'
        ) from error


def _resized(image: Any, box: Box, size: int) -> np.ndarray:
    bilinear = imported('PIL.Image', 'images').Resampling.BILINEAR
    resized = image.resize((size, size), bilinear, box=box)
    return np.asarray(resized)


SUFFIXES = '.jpeg', '.jpg', '.png'


class ImageFolder:
    """A reader of the pictures of a folder that has one folder for each class.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / 'cat').mkdir()
    ...     _ = (Path(folder) / 'cat' / '1.png').write_bytes(b'pixels')
    ...     reader = ImageFolder(Path(folder))
    ...     len(reader), reader[0].content
    (1, b'pixels')
    """

    def __init__(self, folder: Path, classes: tuple[str, ...] | None = None):
        """Lists the files; classes are in the order of their labels, by default sorted.

        Raises a `DataError` for a class without pictures, or without a folder.
        """
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.classes = tuple(names) if classes is None else classes
        for name in {*self.classes} ^ {*names}:
            difference = f'a folder {name} that the training part lacks'
            if name in self.classes:
                difference = f'no folder {name}'
            raise DataError(
                f'{folder} has {difference}: both parts need the same classes, one folder each'
            )
        self._folder = folder
        self._files: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            files = sorted(os.listdir(folder / name))
            files = [file for file in files if file.lower().endswith(SUFFIXES)]
            if not files:
                raise DataError(
                    f'{folder / name} holds no images ({", ".join(SUFFIXES)}): put those of its '
                    'class there'
                )
            self._files += [(f'{name}/{file}', label) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Picture:
        name, label = self._files[index]
        path = self._folder / name
        try:
            return Picture(str(path), path.read_bytes(), label)
        except OSError as error:
            raise DataError(f'{path} cannot be read ({error}): put it back') from error


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


_FILES = (
    'train/<class>/*.JPEG and val/<class>/*.JPEG, or *train*.array_record* and '
    '*validation*.array_record*'
)


class ImageFiles(NamedTuple):
    """Readers of both parts."""

    train: Reader[Picture]
    test: Reader[Picture]
    classes: int | None  # None where files do not say


def read_imagenet(folder: Path) -> ImageFiles:
    """Finds the files; images are read when they are asked for."""
    if not folder.is_dir():
        raise DataError(f'{folder} is not a folder: pass one with {_FILES}')
    if (folder / 'train').is_dir() and (folder / 'val').is_dir():
        train = ImageFolder(folder / 'train')
        return ImageFiles(train, ImageFolder(folder / 'val', train.classes), len(train.classes))
    train = sorted(folder.glob('*train*.array_record*'))
    test = sorted(folder.glob('*validation*.array_record*'))
    if not (train and test):
        raise DataError(f'{folder} does not hold both parts of ImageNet: it needs {_FILES}')
    return ImageFiles(ArrayRecords(train), ArrayRecords(test), None)


COLUMN = 'text'


class Corpus(NamedTuple):
    """A text whose training part stays on disk."""

    train: Reader[np.ndarray]  # parts, uint8[bytes]
    test: np.ndarray  # uint8[n]
    symbols: np.ndarray  # uint8[256]: every byte may occur


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
    """Finds parquet files, and reads the beginning of the test part.

    Files in whose path is `validation` are for testing, others with `train` for training; where
    one of the two is missing a `DataError` says so.
    """
    names = {path: str(path.relative_to(folder)) for path in sorted(folder.rglob('*.parquet'))}
    test = [path for path, name in names.items() if 'validation' in name]
    train = [path for path, name in names.items() if 'train' in name and path not in test]
    if not (train and test):
        raise DataError(
            f'{folder} does not hold files *train*.parquet and *validation*.parquet: put both parts there'
        )
    train_parts, parts, beginning = ParquetParts(train), ParquetParts(test), np.zeros(0, np.uint8)
    for index in range(len(parts)):
        beginning = np.concatenate([beginning, parts[index]])
        if len(beginning) >= test_bytes:
            break
    symbols = np.arange(256, dtype=np.uint8)
    return Corpus(train_parts, beginning[:test_bytes], symbols)


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


def read_emnist(folder: Path) -> ClientFiles:
    """Finds the training and the test file of FedJAX; reads the test part."""
    train, test = (folder / f'federated_emnist_{part}.sqlite' for part in ('train', 'test'))
    if not (train.is_file() and test.is_file()):
        raise DataError(f'{folder} does not hold {train.name} and {test.name}: put them there')
    reader = SqliteClients(test)
    clients = [reader[index] for index in range(len(reader))]
    images = np.concatenate([client.images for client in clients])
    labels = np.concatenate([client.labels for client in clients])
    return ClientFiles(SqliteClients(train), images, labels)


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
