"""Images of digits as arrays on the device: scikit-learn's 8x8 set, or MNIST from a folder.

MNIST is read from `mnist.npz` or from the four IDX files, plain or gzipped. A file that is absent,
cut short or of another kind is refused by name, with the remedy.
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
    """Images float32[n, height, width, 1] with mean 0 and deviation 1, labels int32[n] in 0..9."""

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
    """As `read_digits`, normalized and on the device.

    >>> load_digits().x_test.shape
    (450, 8, 8, 1)
    """
    return _on_device(read_digits(split_seed, test_share))


def load_mnist(folder: Path) -> Images:
    """As `read_mnist`, normalized and on the device."""
    return _on_device(read_mnist(folder))


def hold_out(images: Images, share: float) -> Images:
    """Leaves a last share of the training images out, for validation; one remains at least."""
    if not 0 <= share < 1:
        raise ValueError(
            f'the share of training images that are held out must lie in [0, 1), got {share}'
        )
    count = len(images.x_train)
    kept = max(1, round(count * (1 - share)))
    return images._replace(x_train=images.x_train[:kept], y_train=images.y_train[:kept])


def read_digits(split_seed: int = 0, test_share: float = 0.25) -> dict[str, np.ndarray]:
    """Reads the 1,797 digits of 8x8 pixels inside the scikit-learn wheel, split alike by class.

    Returns `x_train`, `y_train`, `x_test`, `y_test`: pixels from 0 to 16, labels from 0 to 9.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=test_share, random_state=split_seed, stratify=labels
    )
    arrays: dict[str, Any] = {}
    arrays |= {'x_train': x_train, 'y_train': y_train, 'x_test': x_test, 'y_test': y_test}
    return arrays


def read_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Reads MNIST from a folder that holds `mnist.npz` or the four IDX files.

    Returns `x_train`, `y_train`, `x_test`, `y_test`: pixels from 0 to 255, labels from 0 to 9. A
    folder or file that is missing, cut short or of another kind is a `DataError`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f'{folder} is not a folder: pass one that holds {NPZ_NAME} or the four IDX files of '
            'MNIST'
        )
    if (folder / NPZ_NAME).exists():
        arrays = _read_npz(folder / NPZ_NAME)
    else:
        paths = {key: _find_idx(folder, name) for key, name in IDX_NAMES.items()}
        arrays = {}
        for key, path in paths.items():
            magic = IDX_MAGIC_IMAGES if key.startswith('x') else IDX_MAGIC_LABELS
            arrays[key] = _read_idx(path, magic)
    for part in ('train', 'test'):
        _check_part(arrays, part, folder)
    if arrays['x_train'].shape[1:] != arrays['x_test'].shape[1:]:
        raise DataError(
            f'x_train and x_test in {folder} differ in image size: use files that belong together'
        )
    return arrays


def _read_idx(path: Path, magic: int) -> np.ndarray:
    """The uint8 array in an IDX file, which holds exactly what its header says."""
    content = _read_bytes(path)
    start = int.from_bytes(content[:4], 'big')
    if len(content) < 4 or start != magic:
        expected = 'images' if magic == IDX_MAGIC_IMAGES else 'labels'
        raise DataError(
            f'{path} starts with {start} instead of {magic}, so it is no IDX file of {expected}: '
            'put the right file in its place'
        )
    header_length = 4 + 4 * (magic % 256)
    shape = []
    for offset in range(4, header_length, 4):
        shape.append(int.from_bytes(content[offset : offset + 4], 'big'))
    length = header_length + math.prod(shape)
    if len(content) < header_length or len(content) != length:
        raise DataError(
            f'{path} holds {len(content)} bytes where its header promises {length}: '
            f'{DOWNLOAD_AGAIN}'
        )
    return np.frombuffer(content, np.uint8, offset=header_length).reshape(shape)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """The four arrays of an npz file, each read once."""
    if not zipfile.is_zipfile(path):
        raise DataError(f'{path} is no npz archive, or only the beginning of one: {DOWNLOAD_AGAIN}')
    arrays = {}
    try:
        # Opened here, so that it is closed even where NumPy fails.
        with path.open('rb') as file, np.load(file) as archive:
            for key in IDX_NAMES.keys() & set(archive):
                arrays[key] = archive[key]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f'{path} cannot be read as an npz archive ({error}): {DOWNLOAD_AGAIN}'
        ) from error
    missing = [key for key in IDX_NAMES if key not in arrays]
    if missing:
        raise DataError(f'{path} lacks {", ".join(missing)}: it must hold {", ".join(IDX_NAMES)}')
    return arrays


def _read_bytes(path: Path) -> bytes:
    """A file's content, unpacked where the name ends in .gz."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == '.gz' else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f'{path} cannot be read ({error}): {DOWNLOAD_AGAIN}') from error


def _find_idx(folder: Path, name: str) -> Path:
    """The path of one IDX file: with `-` or `.` before `idx`, plain or gzipped."""
    for stem in (name, name.replace('-idx', '.idx')):
        for suffix in ('', '.gz'):
            path = folder / (stem + suffix)
            if path.is_file():
                return path
    raise DataError(
        f'{folder} holds neither {NPZ_NAME} nor {name}[.gz]: put {NPZ_NAME} or the four IDX files '
        'there'
    )


def _check_part(arrays: dict[str, np.ndarray], part: str, folder: Path) -> None:
    """Refuses arrays that are no square uint8 images with one label of 0..9 each."""
    images, labels = arrays[f'x_{part}'], arrays[f'y_{part}']
    if images.ndim != 3 or images.dtype != np.uint8 or len(images) == 0:
        raise DataError(
            f'x_{part} in {folder} is {images.dtype}{list(images.shape)}, not uint8[images, '
            'height, width]: use the original files'
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f'{folder} has {len(images)} images and labels of shape {list(labels.shape)} in its '
            f'{part} part: use files that belong together'
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() > 9:
        raise DataError(
            f'y_{part} in {folder} holds other values than the digits 0 to 9: use the original '
            'files'
        )


def _on_device(arrays: dict[str, np.ndarray]) -> Images:
    """Normalizes the pixels by the training images' mean and deviation; adds the channel axis."""
    mean = arrays['x_train'].mean()
    deviation = arrays['x_train'].std()

    def normalized(images):
        scaled = (images[..., None] - mean) / deviation
        return jnp.asarray(scaled, jnp.float32)

    return Images(
        x_train=normalized(arrays['x_train']),
        y_train=jnp.asarray(arrays['y_train'], jnp.int32),
        x_test=normalized(arrays['x_test']),
        y_test=jnp.asarray(arrays['y_test'], jnp.int32),
    )
