"""Readers of data that stay on disk: images, texts and clients, each by the format of its files.

A reader is a sequence whose items are read when they are asked for; `mixed`, `windows` and `in_order` make
feeds of readers with grain. All need the extra `readers`.
"""

import importlib
import io
import json
import math
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
_EPOCHS = 2**20  # more than anyone waits for; without a number lengths no longer fit into 64 bits


class GrainFeed:
    """A feed of what a grain dataset yields; its position is that of the dataset's iterator."""

    def __init__(self, dataset: Any):
        self._iterator = iter(dataset)

    def next(self, values: Values | None) -> Any:
        del values
        return next(self._iterator)

    def state(self) -> dict[str, np.ndarray]:
        text = json.dumps(self._iterator.get_state())
        return {'position': np.frombuffer(text.encode(), np.uint8)}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._iterator.set_state(json.loads(state['position'].tobytes()))

    def close(self) -> None:
        self._iterator.close()


def mixed(
    reader: Any,
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


def windows(parts: Any, length: int, batch_size: int, seed: int) -> GrainFeed:
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


def in_order(reader: Any, prepare: Callable[[Any], Any], batch_size: int) -> Iterator[Any]:
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


class ImageFolder:
    """A reader of the pictures of a folder that has one folder for each class, sorted as their labels.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / 'cat').mkdir()
    ...     _ = (Path(folder) / 'cat' / '1.png').write_bytes(b'pixels')
    ...     reader = ImageFolder(Path(folder))
    ...     len(reader), reader[0].content
    (1, b'pixels')
    """

    def __init__(self, folder: Path):
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self._files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Picture:
        path, label = self._files[index]
        return Picture(str(path), path.read_bytes(), label)


class ArrayRecords:
    """A reader of the pictures in array-record files of `tf.train.Example`, as TensorFlow Datasets writes them."""

    def __init__(self, paths: Sequence[Path]):
        module = imported('array_record.python.array_record_data_source', 'array-record files')
        self._pattern = str(paths[0])
        try:
            self._source = module.ArrayRecordDataSource([str(path) for path in paths])
        except Exception as error:  # a RuntimeError or ValueError of the C++ library
            raise DataError(
                f'{self._pattern} and those beside it cannot be read as array-record files ({error}): {DOWNLOAD_AGAIN}'
            ) from error

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Picture:
        name = f'record {index} of {self._pattern} and those beside it'
        try:
            features = _parse_example(self._source[index])
        except Exception as error:  # array_record has its own
            raise DataError(f'{name} cannot be read ({error}): {DOWNLOAD_AGAIN}') from error
        if not {'image', 'label'} <= features.keys():
            raise DataError(
                f"{name} has the features {sorted(features)}; it needs one 'image' (a file's bytes) and one 'label'"
            )
        return Picture(name, features['image'], features['label'])


def _parse_example(record: bytes) -> dict[str, Any]:
    """The first value of each feature of a `tf.train.Example`: bytes and whole numbers."""
    features = {}
    for _, pairs in _fields(record):
        for _, pair in _fields(pairs):
            entry = dict(_fields(pair))
            for number, values in _fields(entry[2]):
                _, first = next(_fields(values))
                if number == 3 and isinstance(first, bytes):  # whole numbers, one after another
                    first, _ = _varint(first, 0)
                features[entry[1].decode()] = first
    return features


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer by their numbers: whole numbers, and all else as bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire_type = divmod(key, 8)
        value, position = _varint(message, position)
        if wire_type == 2:  # the number was a length
            start, position = position, position + value
            value = message[start:position]
        if wire_type not in (0, 2) or position > len(message):
            raise ValueError('it is no tf.train.Example')
        yield number, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A whole number, seven bits a byte, the lowest first; and the position behind it."""
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


class ImageFiles(NamedTuple):
    """Readers of both parts."""

    train: Any
    test: Any
    classes: int | None  # None where files do not say


def read_imagenet(folder: Path) -> ImageFiles:
    """Finds the files; images are read when they are asked for."""
    if (folder / 'train').is_dir() and (folder / 'val').is_dir():
        train, test = ImageFolder(folder / 'train'), ImageFolder(folder / 'val')
        if train.classes != test.classes or not len(train):
            raise DataError(
                f'{folder}: both parts need images of the same classes, one folder each; train has '
                f'{len(train.classes)} folders and val has {len(test.classes)}'
            )
        return ImageFiles(train, test, len(train.classes))
    train = sorted(folder.glob('*train*.array_record*'))
    test = sorted(folder.glob('*validation*.array_record*'))
    if not (train and test):
        raise DataError(
            f'{folder} does not hold both parts of ImageNet: it needs train/<class>/*.JPEG and val/<class>/*.JPEG, or '
            '*train*.array_record* and *validation*.array_record*'
        )
    return ImageFiles(ArrayRecords(train), ArrayRecords(test), None)


COLUMN = 'text'


class Corpus(NamedTuple):
    """A text whose training part stays on disk."""

    train: Any  # parts, uint8[bytes]
    test: np.ndarray  # uint8[n]
    symbols: np.ndarray  # uint8[256]: every byte may occur


class ParquetParts:
    """A reader of the column `text` of parquet files, a group of rows at a time."""

    def __init__(self, paths: Sequence[Path]):
        self._parquet = imported('pyarrow.parquet', 'parquet files')
        self._parts: list[tuple[Path, int]] = []
        for path in paths:
            with self._opened(path, 'as a parquet file') as file:
                names, groups = file.schema_arrow.names, file.num_row_groups
            if COLUMN not in names:
                raise DataError(f'{path} has the columns {names}: it needs one named {COLUMN!r}')
            self._parts += [(path, group) for group in range(groups)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> np.ndarray:
        path, group = self._parts[index]
        with self._opened(path, f'in row group {group}') as file:
            rows = file.read_row_group(group, columns=[COLUMN])[COLUMN].to_pylist()
        return np.frombuffer(b'\n'.join(row.encode() for row in rows if row), np.uint8)

    @contextmanager
    def _opened(self, path: Path, what: str) -> Iterator[Any]:
        try:
            with self._parquet.ParquetFile(path) as file:
                yield file
        except (OSError, ValueError) as error:
            raise DataError(f'{path} cannot be read {what} ({error}): {DOWNLOAD_AGAIN}') from error


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
    parts, beginning = ParquetParts(test), np.zeros(0, np.uint8)
    for index in range(len(parts)):
        beginning = np.concatenate([beginning, parts[index]])
        if len(beginning) >= test_bytes:
            break
    symbols = np.arange(256, dtype=np.uint8)
    return Corpus(ParquetParts(train), beginning[:test_bytes], symbols)


def read_emnist(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each writer wrote, in one of FedJAX's files: images float32[n, 28, 28, 1] and labels int32[n].

    Images are 0 where there is no ink; labels are from 0 to 61: digits, capitals, small letters. A file that is missing
    or damaged is a `DataError`.
    """
    msgpack = imported('msgpack', "FedJAX's files")

    def array(extension: int, data: bytes) -> np.ndarray:
        if extension != 1:
            raise ValueError(f'extension type {extension} where an array belongs')
        shape, dtype_name, content = msgpack.unpackb(data, raw=True)
        return np.frombuffer(content, dtype_name.decode()).reshape(shape)

    errors = sqlite3.Error, zlib.error, ValueError, KeyError, TypeError, msgpack.UnpackException
    clients = []
    try:
        with closing(sqlite3.connect(f'{path.absolute().as_uri()}?mode=ro', uri=True)) as database:
            query = 'SELECT data FROM federated_data ORDER BY client_id'
            for (compressed,) in database.execute(query):
                content = zlib.decompress(compressed)
                fields = msgpack.unpackb(content, ext_hook=array, raw=False)
                pixels, labels = fields['pixels'], fields['label'].reshape(-1)
                if pixels.ndim != 3 or len(pixels) != len(labels) or not len(labels):
                    raise ValueError(f'{pixels.shape} pixels, {len(labels)} labels')
                images = 1 - pixels[..., None].astype(np.float32)
                clients.append((images, labels.astype(np.int32)))
    except errors as error:
        writer = f'behind writer {len(clients)} '
        raise DataError(f'{path} cannot be read {writer}({error}): {DOWNLOAD_AGAIN}') from error
    return clients
