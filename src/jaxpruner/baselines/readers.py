"""Readers of data that stay on disk: images, texts and clients, each by the format of its files.

A reader is a sequence whose items are read when they are asked for; `mixed`, `windows` and `in_order` make
feeds of readers with grain. All need the extra `readers`.
"""

import json
import math
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.baselines.data import DOWNLOAD_AGAIN, imported
from jaxpruner.baselines.task import Values

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
    reader: Any, prepare: Callable[[np.random.Generator, Any], Any], batch_size: int, seed: int
) -> GrainFeed:
    """All examples in a random order, again and again in another.

    `prepare` makes an example, a pytree of arrays, of random numbers of its own and an item.

    >>> feed = mixed([1, 2, 3], lambda random, item: np.float32(item), batch_size=3, seed=0)
    >>> sorted(feed.next(None).tolist())
    [1.0, 2.0, 3.0]
    """
    return GrainFeed(_shuffled(reader, prepare, seed).to_iter_dataset().batch(batch_size))


def windows(parts: Any, length: int, batch_size: int, seed: int) -> GrainFeed:
    """Pieces of `length` bytes: those of a batch are from random places of one part of the text.

    >>> windows([np.arange(7, dtype=np.uint8)], length=3, batch_size=2, seed=0).next(None).shape
    (2, 3)
    """

    def cut(random, text):
        text = np.resize(text, max(len(text), length))  # a part that is too short is repeated
        starts = random.integers(len(text) - length + 1, size=batch_size)
        return text[starts[:, None] + np.arange(length)]

    ahead = _grain().ReadOptions(num_threads=2, prefetch_buffer_size=4)  # parts are large
    return GrainFeed(_shuffled(parts, cut, seed).to_iter_dataset(ahead))


def in_order(reader: Any, prepare: Callable[[Any], Any], batch_size: int) -> Iterator[Any]:
    """All examples once; the last batch may be shorter.

    >>> [batch.tolist() for batch in in_order([1, 2, 3], np.float32, batch_size=2)]
    [[1.0, 2.0], [3.0]]
    """
    yield from _grain().MapDataset.source(reader).map(prepare).to_iter_dataset().batch(batch_size)


def _shuffled(reader: Any, prepare: Callable[[np.random.Generator, Any], Any], seed: int) -> Any:
    def prepare_item(index, item):
        return prepare(np.random.default_rng((seed, index)), item)

    items = _grain().MapDataset.source(reader).shuffle(seed=seed).repeat(_EPOCHS)
    return items.map_with_index(prepare_item)


def _grain() -> Any:
    return imported('grain', 'data that are read from disk')


MEAN = (0.485, 0.456, 0.406)  # of ImageNet's red, green and blue, in [0, 1]
DEVIATION = (0.229, 0.224, 0.225)
_MARGIN = 1 / 16  # of each side when testing: what is cut off was seen in training, larger
_AREA = 0.08, 1.0  # share of the picture that a random part has
_RATIO = 3 / 4, 4 / 3  # of its width to its height
_TRIES = 10


class ImageFiles(NamedTuple):
    """The pictures of both parts, as pairs of a file and its label."""

    train: Sequence[tuple[Path, int]]
    test: Sequence[tuple[Path, int]]
    classes: int


def read_imagenet(folder: Path) -> ImageFiles:
    """Finds the files, one folder a class, sorted as their labels; images are read when they are asked for."""
    classes, parts = {}, {}
    for part in ('train', 'val'):
        folders = sorted(path for path in (folder / part).glob('*') if path.is_dir())
        classes[part] = [path.name for path in folders]
        parts[part] = [
            (path, label) for label, each in enumerate(folders) for path in sorted(each.iterdir())
        ]
    if not parts['train'] or classes['train'] != classes['val']:
        raise ValueError(
            f'{folder} must hold train/<class>/*.JPEG and val/<class>/*.JPEG of the same classes; train has '
            f'{len(classes["train"])} folders and val has {len(classes["val"])}'
        )
    return ImageFiles(parts['train'], parts['val'], len(classes['train']))


def random_part(
    random: np.random.Generator, picture: tuple[Path, int], size: int
) -> dict[str, Any]:
    """A random part, half of the time mirrored: `image` uint8[size, size, 3], `label` int32.

    As Szegedy et al. 2015 (https://arxiv.org/abs/1409.4842), the middle where no part of a few fits; a damaged picture
    is a `ValueError`.
    """
    image = _decoded(picture[0])
    width, height = image.size
    for _ in range(_TRIES):
        area = random.uniform(*_AREA) * width * height
        ratio = math.exp(random.uniform(*np.log(_RATIO)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = random.integers((width - wide + 1, height - high + 1)).tolist()
            box = left, upper, left + wide, upper + high
            part = image.resize((size, size), _pillow('Image').Resampling.BILINEAR, box=box)
            break
    else:
        part = _middle(image, size)
    pixels = np.asarray(part)
    if random.random() < 0.5:
        pixels = pixels[:, ::-1]
    return {'image': pixels, 'label': np.int32(picture[1])}


def middle(picture: tuple[Path, int], size: int) -> dict[str, Any]:
    """The square in the middle, without a margin, as of `random_part`."""
    image = _middle(_decoded(picture[0]), size, _MARGIN)
    return {'image': np.asarray(image), 'label': np.int32(picture[1])}


def _middle(image: Any, size: int, margin: float = 0.0) -> Any:
    bilinear = _pillow('Image').Resampling.BILINEAR
    return _pillow('ImageOps').fit(image, (size, size), bilinear, bleed=margin)


def _decoded(path: Path) -> Any:
    module = _pillow('Image')
    try:
        with module.open(path) as file:
            return file.convert('RGB')
    except (OSError, SyntaxError, ValueError, module.DecompressionBombError) as error:
        raise ValueError(
            f'{path} cannot be read as an image ({error}): {DOWNLOAD_AGAIN}'
        ) from error


def _pillow(name: str) -> Any:
    return imported(f'PIL.{name}', 'images')


class ParquetParts:
    """A reader of the column `text` of parquet files, a group of rows at a time."""

    def __init__(self, paths: Sequence[Path]):
        self._parquet = imported('pyarrow.parquet', 'parquet files')
        self._parts: list[tuple[Path, int]] = []
        for path in paths:
            with self._opened(path) as file:
                self._parts += [(path, group) for group in range(file.num_row_groups)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> np.ndarray:
        path, group = self._parts[index]
        with self._opened(path) as file:
            rows = file.read_row_group(group, columns=['text'])['text'].to_pylist()
        return np.frombuffer(b'\n'.join(row.encode() for row in rows if row), np.uint8)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with self._parquet.ParquetFile(path) as file:
                yield file
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be read as a parquet file with a column 'text' ({error}): {DOWNLOAD_AGAIN}"
            ) from error


def read_corpus(folder: Path, test_bytes: int) -> tuple[ParquetParts, np.ndarray]:
    """Finds parquet files; returns parts that stay on disk, and the beginning of the test part, uint8[n].

    Files in whose path is `validation` are for testing, others with `train` for training; where
    one of the two is missing a `ValueError` says so.
    """
    names = {path: str(path.relative_to(folder)) for path in sorted(folder.rglob('*.parquet'))}
    test = [path for path, name in names.items() if 'validation' in name]
    train = [path for path, name in names.items() if 'train' in name and path not in test]
    if not (train and test):
        raise ValueError(
            f'{folder} does not hold files *train*.parquet and *validation*.parquet: put both parts there'
        )
    beginning = b''
    for part in ParquetParts(test):
        beginning += part.tobytes()
        if len(beginning) >= test_bytes:
            break
    return ParquetParts(train), np.frombuffer(beginning[:test_bytes], np.uint8)


def read_emnist(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each writer wrote, in one of FedJAX's files: images float32[n, 28, 28, 1] and labels int32[n].

    Images are 0 where there is no ink; labels are from 0 to 61: digits, capitals, small letters. A file that is missing
    or damaged is a `ValueError`.
    """
    msgpack = imported('msgpack', "FedJAX's files")

    def array(extension: int, data: bytes) -> np.ndarray:
        del extension
        shape, dtype_name, content = msgpack.unpackb(data, raw=True)
        return np.frombuffer(content, dtype_name.decode()).reshape(shape)

    clients = []
    try:
        with closing(sqlite3.connect(f'{path.absolute().as_uri()}?mode=ro', uri=True)) as database:
            query = 'SELECT data FROM federated_data ORDER BY client_id'
            for (compressed,) in database.execute(query):
                fields = msgpack.unpackb(zlib.decompress(compressed), ext_hook=array)
                images = 1 - fields['pixels'].astype(np.float32).reshape(-1, 28, 28, 1)
                labels = fields['label'].reshape(len(images)).astype(np.int32)
                clients.append((images, labels))
    except Exception as error:  # of SQLite, zlib, msgpack or NumPy
        writer = f'behind writer {len(clients)} '
        raise ValueError(f'{path} cannot be read {writer}({error}): {DOWNLOAD_AGAIN}') from error
    return clients
