"""Images of digits as arrays: scikit-learn's 8x8 set, or MNIST from a folder, as the library's workloads read them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpruner.baselines.data import read_digits, read_mnist


class Dataset(NamedTuple):
    """Images float32[n, height, width, 1] in [0, 1] and labels int32[n] in 0..9, for training and for testing."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_dataset(data_dir: Path | None, split_seed: int = 0) -> Dataset:
    """Returns MNIST from `data_dir`, or scikit-learn's digits where no folder is named.

    Raises:
      ValueError: the folder or a file in it is missing, cut short or of another kind.
    """
    if data_dir is None:
        return _as_dataset('digits', read_digits(split_seed), brightest=16)
    return _as_dataset('MNIST', read_mnist(data_dir), brightest=255)


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
