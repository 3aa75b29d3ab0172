"""Digits and MNIST: each format that is read, and each file that is refused."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from jaxpruner.baselines import data

SHARED = os.environ.get('JAXPRUNER_SHARED')
IMAGES, LABELS = 'train-images-idx3-ubyte', 'train-labels-idx1-ubyte'


def mnist_arrays():
    random = np.random.default_rng(0)
    arrays = {}
    for part, number in (('train', 6), ('test', 3)):
        arrays[f'x_{part}'] = random.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        arrays[f'y_{part}'] = random.integers(0, 10, number, dtype=np.uint8)
    return arrays


def idx_bytes(array):
    header = [0x800 + array.ndim, *array.shape]
    return b''.join(number.to_bytes(4, 'big') for number in header) + array.tobytes()


def write_npz(folder, **changes):
    np.savez_compressed(folder / 'mnist.npz', **{**mnist_arrays(), **changes})


def write_idx(folder, suffix='', dot=False):
    for key, name in data.IDX_NAMES.items():
        content = idx_bytes(mnist_arrays()[key])
        path = folder / (name.replace('-idx', '.idx') + suffix if dot else name + suffix)
        path.write_bytes(gzip.compress(content) if suffix else content)


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize(
    'write',
    [
        write_npz,
        write_idx,
        lambda folder: write_idx(folder, '.gz'),
        lambda folder: write_idx(folder, dot=True),
    ],
    ids=['npz', 'idx', 'idx.gz', 'dotted idx'],
)
def test_mnist_is_read_from_each_format(tmp_path, write):
    write(tmp_path)
    arrays, expected = data.read_mnist(tmp_path), mnist_arrays()
    for key in expected:
        np.testing.assert_array_equal(arrays[key], expected[key], strict=True)


def test_images_are_normalized_on_the_device(tmp_path):
    write_npz(tmp_path)
    loaded = data.load_mnist(tmp_path)
    assert loaded.x_train.shape == (6, 28, 28, 1)
    assert loaded.y_test.shape == (3,)
    np.testing.assert_allclose([loaded.x_train.mean(), loaded.x_train.std()], [0, 1], atol=1e-5)


@pytest.mark.parametrize(('share', 'left'), [(0.0, 1347), (0.1, 1212), (0.5, 674)])
def test_a_share_of_the_training_images_is_held_out(share, left):
    images = data.load_digits()
    kept = data.hold_out(images, share)
    np.testing.assert_array_equal(kept.x_train, images.x_train[:left])
    np.testing.assert_array_equal(kept.y_train, images.y_train[:left])
    assert kept.x_test is images.x_test


@pytest.mark.parametrize('share', [-0.1, 1.0])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(ValueError, match=r'held out must lie in \[0, 1\), got ' + str(share)):
        data.hold_out(data.load_digits(), share)


def test_scikit_learns_digits_need_no_file():
    arrays = data.read_digits()
    assert len(arrays['x_train']) + len(arrays['x_test']) == 1797
    assert (arrays['x_train'].min(), arrays['x_train'].max()) == (0, 16)
    counts = np.bincount(arrays['y_test'], minlength=10)
    assert counts.min() >= counts.max() - 3  # split alike for every class


def spoil(kind, folder):
    """Writes a folder that must be refused."""
    if kind.startswith('npz'):
        write_npz(folder)
    else:
        write_idx(folder, '.gz' if 'gz' in kind else '')
    arrays, npz = mnist_arrays(), folder / 'mnist.npz'
    match kind:
        case 'no file':
            for path in folder.iterdir():
                path.unlink()
        case 'idx missing':
            (folder / LABELS).unlink()
        case 'idx cut short':
            cut(folder / IMAGES, 100)
        case 'idx empty':
            cut(folder / IMAGES, 0)
        case 'idx only header':
            cut(folder / IMAGES, 8)
        case 'idx too long':
            with (folder / IMAGES).open('ab') as file:
                file.write(b'more')
        case 'idx of labels':
            (folder / IMAGES).write_bytes((folder / LABELS).read_bytes())
        case 'idx gz cut short':
            cut(folder / f'{IMAGES}.gz', 100)
        case 'idx gz in name only':
            (folder / f'{IMAGES}.gz').write_bytes(idx_bytes(arrays['x_train']))
        case 'idx of another set':
            (folder / LABELS).write_bytes(idx_bytes(arrays['y_test']))
        case 'npz cut short':
            cut(npz, 1000)
        case 'npz empty':
            cut(npz, 0)
        case 'npz damaged':
            content = bytearray(npz.read_bytes())
            content[len(content) // 3 : len(content) // 3 + 200] = bytes(200)
            npz.write_bytes(content)
        case 'npz of text':
            npz.write_text('version https://git-lfs.github.com/spec/v1')
        case 'npz is npy':
            with npz.open('wb') as file:
                np.save(file, arrays['x_train'])
        case 'npz lacks an array':
            np.savez(npz, **{key: value for key, value in arrays.items() if key != 'y_test'})
        case 'npz of objects':
            write_npz(folder, x_train=np.array([None, 'image'], object))
        case 'npz of floats':
            write_npz(folder, x_train=arrays['x_train'] / 255)
        case 'npz of letters':
            write_npz(folder, y_train=arrays['y_train'] + 10)
        case 'npz of two sizes':
            write_npz(folder, x_test=arrays['x_test'][:, :8, :8])


@pytest.mark.parametrize(
    ('kind', 'words'),
    [
        ('no file', ['mnist.npz', IMAGES, 'put']),
        ('idx missing', [LABELS, 'put']),
        ('idx cut short', [IMAGES, 'again']),
        ('idx empty', [IMAGES, 'put the right file']),
        ('idx only header', [IMAGES, 'again']),
        ('idx too long', [IMAGES, 'promises', 'again']),
        ('idx of labels', [IMAGES, '2049', '2051', 'put the right file']),
        ('idx gz cut short', [f'{IMAGES}.gz', 'again']),
        ('idx gz in name only', [f'{IMAGES}.gz', 'again']),
        ('idx of another set', ['6 images', 'labels of shape [3]', 'belong together']),
        ('npz cut short', ['mnist.npz', 'again']),
        ('npz empty', ['mnist.npz', 'again']),
        ('npz damaged', ['mnist.npz', 'again']),
        ('npz of text', ['mnist.npz', 'again']),
        ('npz is npy', ['mnist.npz', 'again']),
        ('npz lacks an array', ['mnist.npz', 'lacks y_test']),
        ('npz of objects', ['mnist.npz', 'again']),
        ('npz of floats', ['x_train', 'float64', 'original files']),
        ('npz of letters', ['y_train', '0 to 9', 'original files']),
        ('npz of two sizes', ['x_test', 'size', 'belong together']),
    ],
)
def test_a_bad_file_is_refused_by_name_with_the_remedy(tmp_path, kind, words):
    spoil(kind, tmp_path)
    with pytest.raises(data.DataError) as caught:
        data.read_mnist(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    for word in words:
        assert word in message


def test_a_missing_folder_is_refused_by_name(tmp_path):
    with pytest.raises(
        data.DataError, match=r'nowhere is not a folder: pass one that holds mnist\.npz'
    ):
        data.read_mnist(tmp_path / 'nowhere')


@pytest.mark.skipif(
    SHARED is None, reason='MNIST is found through the environment variable JAXPRUNER_SHARED'
)
def test_mnist():
    loaded = data.load_mnist(Path(SHARED or '') / 'data')
    assert loaded.x_train.shape == (60_000, 28, 28, 1)
    assert loaded.x_test.shape == (10_000, 28, 28, 1)
