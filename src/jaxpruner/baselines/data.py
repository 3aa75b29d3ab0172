"""Images of digits as arrays on the device: scikit-learn's 8x8 set, or MNIST from a folder.

MNIST is read from `mnist.npz`. A file that is absent, cut short or of another kind is refused by name, with the remedy.
"""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.baselines.recipe import Recipe

DOWNLOAD_AGAIN = 'copy or download it again'


class Images(NamedTuple):
    """Images float32[n, height, width, 1] with mean 0 and deviation 1, labels int32[n] in 0..9."""

    x_train: jax.Array
    y_train: jax.Array
    x_test: jax.Array
    y_test: jax.Array


def imported(name: str, use: str, extra: str = 'readers') -> Any:
    """Imports a module, or says which package its use needs, and the extra that brings it.

    >>> imported('no_such_module', 'numbers')
    Traceback (most recent call last):
    ...
    ImportError: numbers need no_such_module, which is not installed: pip install 'jaxpruner[readers]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition('.')[0]
        raise ImportError(
            f"{use} need {package}, which is not installed: pip install 'jaxpruner[{extra}]'"
        ) from error


def check_no_folder(name: str, folder: Path | None) -> None:
    """Refuses a folder for data that come with a package: it would not be read."""
    if folder is not None:
        raise ValueError(
            f'{name} is read from no folder: leave --data-dir {folder} out, or name other data'
        )


def require_folder(recipe: Recipe, folder: Path | None, content: str) -> Path:
    """The folder of data that lie in one; a `ValueError` where none was given."""
    if folder is None:
        which = f'the preset {recipe.preset!r} of {recipe.workload}'
        raise ValueError(f'{which} needs --data-dir: a folder with {content}')
    return Path(folder)


def load_images(recipe: Recipe, folder: Path | None, other: str) -> Images:
    """The digits or MNIST, as the recipe says; `other` is what else its workload reads, for the error."""
    if recipe.data == 'digits':
        check_no_folder(recipe.data, folder)
        return load_digits()
    if recipe.data == 'mnist':
        return load_mnist(require_folder(recipe, folder, 'MNIST'))
    raise ValueError(
        f"data {recipe.data!r} cannot be read by {recipe.workload}: 'digits', 'mnist' and {other!r} are read"
    )


def load_digits() -> Images:
    """As `read_digits`, normalized and on the device.

    >>> load_digits().x_test.shape
    (450, 8, 8, 1)
    """
    return _on_device(read_digits())


def load_mnist(folder: Path) -> Images:
    """As `read_mnist`, normalized and on the device."""
    return _on_device(read_mnist(folder))


def hold_out(images: Images, share: float) -> Images:
    """Leaves a last share of the training images out, for validation; one remains at least."""
    count = len(images.x_train)
    kept = max(1, round(count * (1 - share)))
    return images._replace(x_train=images.x_train[:kept], y_train=images.y_train[:kept])


def read_digits(split_seed: int = 0) -> dict[str, np.ndarray]:
    """Reads the 1,797 digits of 8x8 pixels inside the scikit-learn wheel, split alike by class.

    A quarter is for testing. Returns `x_train`, `y_train`, `x_test`, `y_test`: pixels from 0 to 16, labels from 0 to 9.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    parts: Any = train_test_split(
        images.reshape(-1, 8, 8), labels, test_size=0.25, random_state=split_seed, stratify=labels
    )
    return dict(zip(('x_train', 'x_test', 'y_train', 'y_test'), parts, strict=True))


def read_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Reads `mnist.npz`, as Keras has it, from a folder.

    Returns `x_train`, `y_train`, `x_test`, `y_test`: pixels from 0 to 255, labels from 0 to 9. A
    file that is missing, cut short or of another kind is a `ValueError`.
    """
    path = Path(folder) / 'mnist.npz'
    try:
        # Opened here, so that it is closed even where NumPy fails.
        with path.open('rb') as file, np.load(file) as archive:
            arrays = {name: archive[name] for name in Images._fields}
    except Exception as error:  # of the system, NumPy or zip
        raise ValueError(
            f'{path} cannot be read ({error}): name a folder that holds it, or {DOWNLOAD_AGAIN}'
        ) from error
    for part in ('train', 'test'):
        images, labels = arrays[f'x_{part}'], arrays[f'y_{part}']
        sides = arrays['x_train'].shape[1:]
        is_images = images.dtype == np.uint8 and images.ndim == 3 and images.shape[1:] == sides
        is_labels = np.issubdtype(labels.dtype, np.integer) and labels.shape == images.shape[:1]
        if not (is_images and is_labels and set(labels.tolist()) <= {*range(10)}):
            raise ValueError(
                f'{path}: x_{part} is {images.dtype}{list(images.shape)} and y_{part} {labels.dtype}'
                f'{list(labels.shape)}, not uint8[images, height, width] of one size with a label from 0 to 9 each: '
                'use the original file'
            )
    return arrays


def _on_device(arrays: dict[str, np.ndarray]) -> Images:
    """Normalizes the pixels by the training images' mean and deviation; adds the channel axis."""
    mean, deviation = arrays['x_train'].mean(), arrays['x_train'].std()

    def normalized(images):
        return jnp.asarray((images[..., None] - mean) / deviation, jnp.float32)

    images = {name: normalized(arrays[name]) for name in ('x_train', 'x_test')}
    labels = {name: jnp.asarray(arrays[name], jnp.int32) for name in ('y_train', 'y_test')}
    return Images(**images, **labels)
