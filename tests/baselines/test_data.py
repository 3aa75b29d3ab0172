"""Digits and MNIST, and files that are refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxpruner.baselines import data

SHARED = os.environ.get('JAXPRUNER_SHARED')


def mnist_arrays():
    random = np.random.default_rng(0)
    arrays = {}
    for part, number in (('train', 6), ('test', 3)):
        arrays[f'x_{part}'] = random.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        arrays[f'y_{part}'] = random.integers(0, 10, number, dtype=np.uint8)
    return arrays


def write(folder, **changes):
    np.savez_compressed(folder / 'mnist.npz', **mnist_arrays() | changes)


def test_mnist_is_read(tmp_path):
    write(tmp_path)
    arrays, expected = data.read_mnist(tmp_path), mnist_arrays()
    for key in expected:
        np.testing.assert_array_equal(arrays[key], expected[key], strict=True)
    loaded = data.load_mnist(tmp_path)
    assert (loaded.x_train.shape, loaded.y_test.shape) == ((6, 28, 28, 1), (3,))
    np.testing.assert_allclose([loaded.x_train.mean(), loaded.x_train.std()], [0, 1], atol=1e-5)


def test_a_share_of_the_training_images_is_held_out():
    images = data.load_digits()
    kept = data.hold_out(images, 0.1)
    np.testing.assert_array_equal(kept.x_train, images.x_train[:1212])
    np.testing.assert_array_equal(kept.y_train, images.y_train[:1212])
    assert kept.x_test is images.x_test


def test_scikit_learns_digits_need_no_file():
    arrays = data.read_digits()
    assert len(arrays['x_train']) + len(arrays['x_test']) == 1797
    assert (arrays['x_train'].min(), arrays['x_train'].max()) == (0, 16)
    counts = np.bincount(arrays['y_test'], minlength=10)
    assert counts.min() >= counts.max() - 3  # split alike for every class


def test_a_damaged_file_is_refused_by_name_with_the_remedy(tmp_path):
    write(tmp_path)
    path = tmp_path / 'mnist.npz'
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    check_refused(tmp_path, ['mnist.npz', 'again'])


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'x_train': np.array([None, 'image'], object)}, ['mnist.npz', 'again']),
        ({'x_train': mnist_arrays()['x_train'] / 255}, ['x_train', 'float64', 'original file']),
        ({'y_train': mnist_arrays()['y_train'] + 10}, ['y_train', '0 to 9', 'original file']),
        ({'x_test': mnist_arrays()['x_test'][:, :8, :8]}, ['x_test', 'size', 'original file']),
    ],
)
def test_other_arrays_are_refused(changes, words, tmp_path):
    write(tmp_path, **changes)
    check_refused(tmp_path, words)


def test_a_folder_without_files_is_refused(tmp_path):
    check_refused(tmp_path, ['mnist.npz'])
    check_refused(tmp_path / 'nowhere', ['mnist.npz'])


def check_refused(folder, words):
    with pytest.raises(ValueError, match='mnist') as caught:
        data.read_mnist(folder)
    for word in (str(folder), *words):
        assert word in str(caught.value)


@pytest.mark.skipif(SHARED is None, reason='MNIST is found through JAXPRUNER_SHARED')
def test_mnist():
    loaded = data.load_mnist(Path(SHARED or '') / 'data')
    assert loaded.x_train.shape == (60_000, 28, 28, 1)
    assert loaded.x_test.shape == (10_000, 28, 28, 1)
