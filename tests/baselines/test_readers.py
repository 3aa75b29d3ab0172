"""Readers of images, texts and clients, on tiny files; what is damaged is refused by name."""

import sqlite3
import sys

import numpy as np
import pytest

from helpers import files_of_data
from jaxpruner.baselines import readers


def test_pictures_and_their_labels(tmp_path):
    files_of_data.image_folder(tmp_path)
    files = readers.read_imagenet(tmp_path)
    assert (len(files.train), len(files.test), files.classes) == (12, 6, 2)
    random = np.random.default_rng(0)
    parts = [readers.random_part(random, picture, 4) for picture in files.train]
    middles = [readers.middle(picture, 4) for picture in (*files.train, *files.test)]
    for example in (*middles, *parts):
        assert (example['image'].shape, example['image'].dtype) == ((4, 4, 3), np.uint8)
        assert int(example['label']) == (example['image'].mean() > 120)


def test_damaged_images_are_named(tmp_path):
    files_of_data.image_folder(tmp_path)
    train = readers.read_imagenet(tmp_path).train
    damaged = tmp_path / 'train' / 'bee' / 'bee_0.JPEG'
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(ValueError, match=r'bee_0\.JPEG cannot be read as an image .*again'):
        [readers.middle(picture, 4) for picture in train]
    (tmp_path / 'val' / 'wasp').mkdir()
    with pytest.raises(ValueError, match='train has 2 folders and val has 3'):
        readers.read_imagenet(tmp_path)
    with pytest.raises(ValueError, match='must hold train/<class>/'):
        readers.read_imagenet(tmp_path / 'train')


def feed_of(kind, seed=0):
    if kind == 'mixed':
        prepare = lambda random, item: np.array([item, random.integers(1000)])  # noqa: E731
        return readers.mixed(range(7), prepare, 4, seed)
    parts = [np.arange(start, start + 11, dtype=np.uint8) for start in range(0, 220, 11)]
    return readers.windows(parts, 3, 5, seed)


@pytest.mark.parametrize('kind', ['mixed', 'windows'])
def test_feeds_go_on_where_they_were(kind):
    feed = feed_of(kind)
    batches = [feed.next(None).tolist() for _ in range(20)]
    feed.close()
    assert len({str(batch) for batch in batches}) == 20
    begun, again, other = feed_of(kind), feed_of(kind), feed_of(kind, seed=1)
    assert [begun.next(None).tolist() for _ in range(9)] == batches[:9]
    again.set_state(begun.state())
    assert [again.next(None).tolist() for _ in range(11)] == batches[9:]
    assert [other.next(None).tolist() for _ in range(3)] != batches[:3]
    for each in (begun, again, other):
        each.close()
    if kind == 'mixed':  # every example once before any comes again
        items = np.concatenate(batches)[:70, 0].reshape(10, 7)
        assert np.sort(items).tolist() == [list(range(7))] * 10


def test_texts_are_packed(tmp_path):
    files_of_data.parquet_files(tmp_path)
    train, test = readers.read_corpus(tmp_path, 100)
    whole = '\n'.join(files_of_data.TEXT).encode()
    assert b'\n'.join(train[index].tobytes() for index in range(len(train))) == whole
    assert test.tobytes() == whole[:100]
    feed = readers.windows(train, 50, 8, seed=0)
    batch = feed.next(None)
    feed.close()
    assert (batch.shape, batch.dtype) == ((8, 50), np.uint8)
    assert all(row.tobytes() in whole for row in batch)
    assert len({row.tobytes() for row in batch}) > 4
    feed = readers.windows([np.arange(3, dtype=np.uint8)], 4, 1, seed=0)  # a part that is too short
    assert feed.next(None).tolist() == [[0, 1, 2, 0]]
    feed.close()


def test_texts_that_are_refused(tmp_path, monkeypatch):
    files_of_data.parquet_files(tmp_path, column='content')
    words = r"0000\.parquet cannot be read as a parquet file with a column 'text'"
    with pytest.raises(ValueError, match=words):
        readers.read_corpus(tmp_path, 100)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with pytest.raises(ImportError, match=r'parquet files need pyarrow, .*jaxpruner\[readers\]'):
        readers.read_corpus(tmp_path, 100)


def test_clients_are_read_and_damaged_ones_are_named(tmp_path):
    files_of_data.fedjax_clients(tmp_path)
    path = tmp_path / 'federated_emnist_train.sqlite'
    writers = files_of_data.writers(np.random.default_rng(0))
    for (images, labels), (_, pixels, given) in zip(
        readers.read_emnist(path), writers, strict=True
    ):
        np.testing.assert_array_equal(images, 1 - pixels[..., None])
        np.testing.assert_array_equal(labels, given)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE federated_data SET data = x'00' WHERE num_examples = 4")
    connection.commit()
    connection.close()
    with pytest.raises(ValueError, match=r'train\.sqlite cannot be read behind writer 1 '):
        readers.read_emnist(path)
    path.write_bytes(b'no database, and long enough to be sure of it' * 9)
    with pytest.raises(ValueError, match=r'train\.sqlite cannot be read .*not a database'):
        readers.read_emnist(path)
