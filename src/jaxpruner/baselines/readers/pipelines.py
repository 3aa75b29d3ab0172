"""From a reader to batches, with grain: in an order that a seed decides, read ahead by threads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxpruner.baselines.feeds import Values
from jaxpruner.baselines.readers.optional_packages import imported

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
