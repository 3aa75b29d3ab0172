"""Images of digits as arrays: scikit-learn's 8x8 set, or MNIST from a folder.

MNIST is read from `mnist.npz` or from the four IDX files, plain or gzipped. A file that is absent, cut short or of
another kind is refused by name, with the remedy.
"""

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

IDX_MAGIC_IMAGES = 2051  # bytes 0, 0, 8 (unsigned bytes), 3 (dimensions)
IDX_MAGIC_LABELS = 2049  # bytes 0, 0, 8 (unsigned bytes), 1 (dimension)
IDX_NAMES = {
    'x_train': 'train-images-idx3-ubyte',
    'y_train': 'train-labels-idx1-ubyte',
    'x_test': 't10k-images-idx3-ubyte',
    'y_test': 't10k-labels-idx1-ubyte',
}
NPZ_NAME = 'mnist.npz'
DOWNLOAD_AGAIN = 'copy or download it again'


class DataError(ValueError):
    """A data folder or file that cannot be used; the message names it and says what to do."""


class Dataset(NamedTuple):
    """Images float32[n, height, width, 1] in [0, 1] and labels int32[n] in 0..9, for training and for testing."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_dataset(data_dir: Path | None, split_seed: int = 0) -> Dataset:
    """Returns MNIST from `data_dir`, or scikit-learn's digits where no folder is named."""
    return load_sklearn_digits(split_seed) if data_dir is None else load_mnist(data_dir)


def load_sklearn_digits(split_seed: int = 0, test_share: float = 0.25) -> Dataset:
    """Returns the 1,797 digits that lie inside the scikit-learn wheel, split alike for every class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=test_share, random_state=split_seed, stratify=labels
    )
    arrays = {'x_train': x_train, 'y_train': y_train, 'x_test': x_test, 'y_test': y_test}
    return _as_dataset('digits', arrays, brightest=16)


def load_mnist(folder: Path) -> Dataset:
    """Returns MNIST from a folder that holds `mnist.npz` or the four IDX files.

    Raises:
      DataError: the folder or a file in it is missing, cut short or of another kind.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f'{folder} is not a folder: pass one that holds {NPZ_NAME} or the four IDX files of MNIST')
    if (folder / NPZ_NAME).exists():
        arrays = _read_npz(folder / NPZ_NAME)
    else:
        paths = {key: _find_idx(folder, name) for key, name in IDX_NAMES.items()}
        arrays = {key: read_idx(path, _magic_for(key)) for key, path in paths.items()}
    _check_arrays(arrays, folder)
    return _as_dataset('MNIST', arrays, brightest=255)


def read_idx(path: Path, magic: int) -> np.ndarray:
    """Returns the uint8 array in an IDX file, which must start with `magic` and hold exactly what its header says."""
    content = _read_bytes(path)
    found = int.from_bytes(content[:4], 'big')
    if len(content) < 4 or found != magic:
        raise DataError(
            f'{path} starts with {found} instead of {magic}, so it is no IDX file of '
            f'{"images" if magic == IDX_MAGIC_IMAGES else "labels"}: put the right file in its place'
        )
    header_length = 4 + 4 * (magic % 256)
    shape = [int.from_bytes(content[at : at + 4], 'big') for at in range(4, header_length, 4)]
    expected = header_length + math.prod(shape)
    if len(content) < header_length or len(content) != expected:
        raise DataError(f'{path} holds {len(content)} bytes where its header promises {expected}: {DOWNLOAD_AGAIN}')
    return np.frombuffer(content, np.uint8, offset=header_length).reshape(shape)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Returns the four arrays of an npz file, each read once."""
    if not zipfile.is_zipfile(path):
        raise DataError(f'{path} is no npz archive, or only the beginning of one: {DOWNLOAD_AGAIN}')
    try:
        # Opened here, so that it is closed whatever NumPy finds in it.
        with path.open('rb') as file, np.load(file) as archive:
            missing = [key for key in IDX_NAMES if key not in archive]
            arrays = {key: archive[key] for key in IDX_NAMES if key not in missing}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f'{path} cannot be read as an npz archive ({error}): {DOWNLOAD_AGAIN}') from error
    if missing:
        raise DataError(f'{path} lacks {", ".join(missing)}: it must hold {", ".join(IDX_NAMES)}')
    return arrays


def _read_bytes(path: Path) -> bytes:
    """Returns a file's content, unpacked where the name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f'{path} cannot be read ({error}): {DOWNLOAD_AGAIN}') from error


def _find_idx(folder: Path, name: str) -> Path:
    """Returns the path of one IDX file: with `-` or `.` before `idx`, plain or gzipped."""
    for stem in (name, name.replace('-idx', '.idx')):
        for suffix in ('', '.gz'):
            if (folder / (stem + suffix)).is_file():
                return folder / (stem + suffix)
    raise DataError(f'{folder} holds neither {NPZ_NAME} nor {name}[.gz]: put {NPZ_NAME} or the four IDX files there')


def _magic_for(key: str) -> int:
    return IDX_MAGIC_IMAGES if key.startswith('x') else IDX_MAGIC_LABELS


def _check_arrays(arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Refuses arrays that are no square uint8 images with one label of 0..9 each."""
    for part in ('train', 'test'):
        images, labels = arrays[f'x_{part}'], arrays[f'y_{part}']
        if images.ndim != 3 or images.dtype != np.uint8 or len(images) == 0:
            raise DataError(
                f'x_{part} in {folder} is {images.dtype}{list(images.shape)}, not uint8[images, height, width]: '
                'use the original files'
            )
        if labels.shape != images.shape[:1]:
            raise DataError(
                f'{folder} has {len(images)} images and labels of shape {list(labels.shape)} in its {part} part: '
                'use files that belong together'
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() > 9:
            raise DataError(f'y_{part} in {folder} holds other values than the digits 0 to 9: use the original files')
    if arrays['x_train'].shape[1:] != arrays['x_test'].shape[1:]:
        raise DataError(f'x_train and x_test in {folder} differ in image size: use files that belong together')


def _as_dataset(name: str, arrays: dict[str, np.ndarray], brightest: int) -> Dataset:
    """Scales the pixels to [0, 1] and adds the channel axis."""
    return Dataset(
        name,
        **{
            key: (array[..., None] / np.float32(brightest)).astype(np.float32)
            if key.startswith('x')
            else array.astype(np.int32)
            for key, array in arrays.items()
        },
    )
