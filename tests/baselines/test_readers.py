"""Readers of images, texts and clients, on tiny files; what is damaged is refused by name."""

import sqlite3
import sys

import numpy as np
import pytest

from helpers import files_of_data
from jaxpruner.baselines import readers
from jaxpruner.baselines.data import DataError


@pytest.mark.parametrize('write', [files_of_data.image_folder, files_of_data.image_records])
def test_pictures_and_their_labels(write, tmp_path):
    write(tmp_path)
    files = readers.read_imagenet(tmp_path)
    assert (len(files.train), len(files.test)) == ((12, 6) if files.classes else (12, 3))
    for part in (files.train, files.test):
        examples = [readers.middle(part[index], 4) for index in range(len(part))]
        assert {example['image'].shape for example in examples} == {(4, 4, 3)}
        assert {example['image'].dtype for example in examples} == {np.dtype('uint8')}
        assert [int(example['label']) for example in examples] == [
            example['image'].mean() > 120 for example in examples
        ]


def first_file(folder, pattern):
    return sorted(folder.glob(pattern))[0]


def damage(path, at=None):
    content = path.read_bytes()
    path.write_bytes(
        content[: len(content) // 2] if at is None else content[:at] + b'damage' + content[at + 6 :]
    )


def all_of(reader):
    return [readers.middle(reader[index], 4) for index in range(len(reader))]


def test_damaged_images_are_named(tmp_path):
    files_of_data.image_folder(tmp_path)
    train = readers.read_imagenet(tmp_path).train
    damage(first_file(tmp_path, 'train/bee/*'))
    with pytest.raises(
        DataError, match=r'bee_0\.JPEG cannot be read as an image .*download it again'
    ):
        all_of(train)
    first_file(tmp_path, 'train/bee/*').unlink()
    with pytest.raises(DataError, match=r'bee_0\.JPEG cannot be read .*put it back'):
        all_of(train)


def test_folders_that_do_not_fit_are_named(tmp_path):
    files_of_data.image_folder(tmp_path)
    (tmp_path / 'val' / 'wasp').mkdir()
    with pytest.raises(DataError, match='val has a folder wasp that the training part lacks'):
        readers.read_imagenet(tmp_path)
    (tmp_path / 'val' / 'wasp').rmdir()
    (tmp_path / 'train' / 'wasp').mkdir()
    with pytest.raises(DataError, match=r'wasp holds no images \(\.jpeg, \.jpg, \.png\)'):
        readers.read_imagenet(tmp_path)
    with pytest.raises(DataError, match='val has no folder wasp'):
        readers.ImageFolder(tmp_path / 'val', ('ant', 'bee', 'wasp'))
    with pytest.raises(DataError, match='does not hold both parts of ImageNet'):
        readers.read_imagenet(tmp_path / 'train')


def test_damaged_records_are_named(tmp_path):
    files_of_data.image_records(tmp_path)
    path = first_file(tmp_path, '*train*')
    damage(path, at=path.read_bytes().index(b'JFIF'))
    with pytest.raises(
        DataError, match=r'train\.array_record-00000-of-00002, record \d cannot be read'
    ):
        all_of(readers.read_imagenet(tmp_path).train)
    damage(path)
    with pytest.raises(DataError, match='00000-of-00002 cannot be read as an array-record file'):
        readers.read_imagenet(tmp_path)
    files_of_data.write_records(path, [files_of_data.example(picture=b'', label=1)])
    with pytest.raises(
        DataError, match=r"has the features \['label', 'picture'\]; it needs one 'image'"
    ):
        all_of(readers.read_imagenet(tmp_path).train)
    files_of_data.write_records(path, [b'no example'])
    with pytest.raises(DataError, match='record 0 cannot be read'):
        all_of(readers.read_imagenet(tmp_path).train)


def test_random_parts_lie_inside_and_vary():
    random, boxes = np.random.default_rng(0), []
    for _ in range(200):
        left, upper, right, lower = box = readers.random_box(random, 40, 30)
        assert 0 <= left < right <= 40
        assert 0 <= upper < lower <= 30
        assert 0.05 < (right - left) * (lower - upper) / 1200 <= 1
        boxes.append(box)
    assert len(set(boxes)) > 150


def test_half_of_the_training_images_are_mirrored():
    random = np.random.default_rng(0)
    picture = readers.Picture('half.jpg', files_of_data.picture(random, 0), 0)
    seen = {
        readers.random_part(np.random.default_rng(seed), picture, 5)['image'].tobytes()
        for seed in range(8)
    }
    assert len(seen) == 8


def feed_of(kind, seed=0):
    if kind == 'mixed':
        return readers.mixed(
            range(7), lambda random, item: np.array([item, random.integers(1000)]), 4, seed
        )
    if kind == 'numbered':
        return readers.numbered(
            lambda number: np.random.default_rng((seed, number)).integers(1000, size=4)
        )
    parts = [np.arange(start, start + 11, dtype=np.uint8) for start in range(0, 220, 11)]
    return readers.windows(parts, 3, 5, seed)


@pytest.mark.parametrize('kind', ['mixed', 'numbered', 'windows'])
def test_feeds_go_on_where_they_were(kind, tmp_path):
    feed = feed_of(kind)
    batches = [feed.next(None).tolist() for _ in range(30)]
    feed.close()
    assert len({str(batch) for batch in batches}) == 30
    for position in (0, 1, 17):
        begun, again, folder = feed_of(kind), feed_of(kind), tmp_path / str(position)
        folder.mkdir()
        assert [begun.next(None).tolist() for _ in range(position)] == batches[:position]
        begun.save(folder)
        again.restore(folder)
        assert [again.next(None).tolist() for _ in range(position, 30)] == batches[position:]
        begun.close()
        again.close()
    other = feed_of(kind, seed=1)
    assert [other.next(None).tolist() for _ in range(3)] != batches[:3]
    other.close()


def test_every_example_comes_once_before_any_comes_again():
    feed = feed_of('mixed')
    items = np.concatenate([feed.next(None)[:, 0] for _ in range(7)]).reshape(4, 7)
    feed.close()
    assert [sorted(epoch) for epoch in items.tolist()] == [list(range(7))] * 4
    assert len({str(epoch) for epoch in items.tolist()}) > 1


def test_texts_are_packed(tmp_path):
    files_of_data.parquet_files(tmp_path)
    corpus = readers.read_corpus(tmp_path, 100)
    whole = '\n'.join(files_of_data.TEXT).encode()
    assert b'\n'.join(corpus.train[index].tobytes() for index in range(len(corpus.train))) == whole
    assert corpus.test.tobytes() == whole[:100]
    feed = readers.windows(corpus.train, 50, 8, seed=0)
    batch = feed.next(None)
    feed.close()
    assert (batch.shape, batch.dtype) == ((8, 50), np.uint8)
    assert all(row.tobytes() in whole for row in batch)
    assert len({row.tobytes() for row in batch}) == 8


def test_texts_that_are_refused(tmp_path):
    files_of_data.parquet_files(tmp_path, column='content')
    with pytest.raises(
        DataError,
        match=r"0000\.parquet has the columns \['content', 'url'\]: it needs one named 'text'",
    ):
        readers.read_corpus(tmp_path, 100)
    path = tmp_path / 'train' / '0000.parquet'
    damage(path)
    with pytest.raises(DataError, match=r'0000\.parquet cannot be read as a parquet file'):
        readers.read_corpus(tmp_path, 100)
    feed = readers.windows([np.zeros(3, np.uint8)], 4, 2, seed=0)
    with pytest.raises(ValueError, match='parts of the text are all shorter than 4 bytes'):
        feed.next(None)
    feed.close()


def test_a_damaged_row_group_is_named(tmp_path):
    files_of_data.parquet_files(tmp_path)
    path = tmp_path / 'train' / '0000.parquet'
    parts = readers.ParquetParts([path])
    content = path.read_bytes()
    path.write_bytes(content[:10] + b'\xff' * 200 + content[210:])
    with pytest.raises(DataError, match=r'0000\.parquet, row group 0, cannot be read'):
        parts[0]


def test_clients_are_read(tmp_path):
    files_of_data.fedjax_clients(tmp_path)
    files = readers.read_emnist(tmp_path)
    for index, (_, pixels, labels) in enumerate(files_of_data.writers(np.random.default_rng(0))):
        np.testing.assert_array_equal(files.clients[index].images, 1 - pixels[..., None])
        np.testing.assert_array_equal(files.clients[index].labels, labels)
    assert files.x_test.shape == (3 + 4 + 5 + 6, 28, 28, 1)
    assert files.y_test.shape == (18,)


def test_damaged_clients_are_named(tmp_path):
    files_of_data.fedjax_clients(tmp_path)
    path = tmp_path / 'federated_emnist_train.sqlite'
    connection = sqlite3.connect(path)
    connection.execute("UPDATE federated_data SET data = x'00' WHERE num_examples = 4")
    connection.commit()
    connection.close()
    with pytest.raises(DataError, match=r"train\.sqlite, client b'f0001_00', cannot be read"):
        readers.read_emnist(tmp_path).clients[1]
    path.write_bytes(b'no database, and long enough to be sure of it' * 9)
    with pytest.raises(DataError, match=r'train\.sqlite cannot be read \(file is not a database\)'):
        readers.read_emnist(tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    files_of_data.parquet_files(tmp_path)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with pytest.raises(
        ImportError, match=r"parquet files need pyarrow, .*pip install 'jaxpruner\[readers\]'"
    ):
        readers.read_corpus(tmp_path, 100)
