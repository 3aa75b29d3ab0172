"""Images of digits as arrays on the device: scikit-learn's 8x8 set, or MNIST from a folder.

MNIST is read from `mnist.npz` or from the four IDX files, plain or gzipped. A file that is absent, cut short or of
another kind is refused by name, with the remedy.
"""

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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


class Images(NamedTuple):
    """Images float32[n, height, width, 1] with mean 0 and deviation 1, labels int32[n] in 0..9; a pytree of arrays."""

    x_train: jax.Array
    y_train: jax.Array
    x_test: jax.Array
    y_test: jax.Array


def check_no_folder(name: str, folder: Path | None) -> None:
    """Refuses a folder for data that come with a package: it would not be read."""
    if folder is not None:
        raise DataError(
            f'{name} is read from no folder: leave --data-dir {folder} out, or name other data'
        )


def load_digits(split_seed: int = 0, test_share: float = 0.25) -> Images:
    """As `read_digits`, normalized and on the device."""
    return _on_device(read_digits(split_seed, test_share))


def load_mnist(folder: Path) -> Images:
    """As `read_mnist`, normalized and on the device."""
    return _on_device(read_mnist(folder))


def hold_out(images: Images, share: float) -> Images:
    """Leaves the last of the training images out, which some recipes keep for validation; one remains at least."""
    if not 0 <= share < 1:
        raise ValueError(
            f'the share of training images that are held out must lie in [0, 1), got {share}'
        )
    kept = max(1, round(len(images.x_train) * (1 - share)))
    return images._replace(x_train=images.x_train[:kept], y_train=images.y_train[:kept])


def read_digits(split_seed: int = 0, test_share: float = 0.25) -> dict[str, np.ndarray]:
    """Reads the 1,797 digits of 8x8 pixels that lie inside the scikit-learn wheel, split alike for every class."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=test_share, random_state=split_seed, stratify=labels
    )
    arrays: dict[str, Any] = {
        'x_train': x_train,
        'y_train': y_train,
        'x_test': x_test,
        'y_test': y_test,
    }
    return arrays


def read_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Reads MNIST from a folder that holds `mnist.npz` or the four IDX files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f'{folder} is not a folder: pass one that holds {NPZ_NAME} or the four IDX files of MNIST'
        )
    if (folder / NPZ_NAME).exists():
        arrays = _read_npz(folder / NPZ_NAME)
    else:
        paths = {key: _find_idx(folder, name) for key, name in IDX_NAMES.items()}
        arrays = {key: _read_idx(path, _magic_for(key)) for key, path in paths.items()}
    _check_arrays(arrays, folder)
    return arrays


def _read_idx(path: Path, magic: int) -> np.ndarray:
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
        raise DataError(
            f'{path} holds {len(content)} bytes where its header promises {expected}: {DOWNLOAD_AGAIN}'
        )
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
        raise DataError(
            f'{path} cannot be read as an npz archive ({error}): {DOWNLOAD_AGAIN}'
        ) from error
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
    raise DataError(
        f'{folder} holds neither {NPZ_NAME} nor {name}[.gz]: put {NPZ_NAME} or the four IDX files there'
    )


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
            raise DataError(
                f'y_{part} in {folder} holds other values than the digits 0 to 9: use the original files'
            )
    if arrays['x_train'].shape[1:] != arrays['x_test'].shape[1:]:
        raise DataError(
            f'x_train and x_test in {folder} differ in image size: use files that belong together'
        )


def _on_device(arrays: dict[str, np.ndarray]) -> Images:
    """Normalizes the pixels by the training images' mean and deviation, and adds the channel axis."""
    mean, deviation = arrays['x_train'].mean(), arrays['x_train'].std()
    return Images(
        **{
            key: jnp.asarray((array[..., None] - mean) / deviation, jnp.float32)
            if key.startswith('x')
            else jnp.asarray(array, jnp.int32)
            for key, array in arrays.items()
        }
    )
