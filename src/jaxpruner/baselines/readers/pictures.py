"""Pictures in files to arrays of one size: a random part for training, the middle for testing."""

import io
import math
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.baselines.data import DOWNLOAD_AGAIN, DataError
from jaxpruner.baselines.readers.optional_packages import imported

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels
MARGIN = 256 / 224  # of the shorter side when testing: what is cut off was seen in training, larger
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's red, green and blue, in [0, 1]
DEVIATION = (0.229, 0.224, 0.225)
_AREA = 0.08, 1.0  # share of the picture that a random part has
_RATIO = 3 / 4, 4 / 3  # of its width to its height
_TRIES = 10


class Picture(NamedTuple):
    """A picture as it lies on disk."""

    name: str  # of the file, and of the record in it; for errors
    content: bytes  # JPEG, PNG and what else pillow reads
    label: int


def random_part(random: np.random.Generator, picture: Picture, size: int) -> dict[str, Any]:
    """A random part, half of the time mirrored: `image` uint8[size, size, 3], `label` int32.

    As Szegedy et al. 2015 (https://arxiv.org/abs/1409.4842); a damaged picture is a `DataError`.
    """
    image = _decoded(picture)
    box = random_box(random, *image.size)
    pixels = _resized(image, box, size)
    if random.random() < 0.5:
        pixels = pixels[:, ::-1]
    return {'image': pixels, 'label': np.int32(picture.label)}


def middle(picture: Picture, size: int) -> dict[str, Any]:
    """The square in the middle, without a margin, as of `random_part`."""
    image = _decoded(picture)
    box = middle_box(*image.size)
    pixels = _resized(image, box, size)
    return {'image': pixels, 'label': np.int32(picture.label)}


def random_box(random: np.random.Generator, width: int, height: int) -> Box:
    """A part with a random area and ratio; the middle where none of a few fits.

    >>> random_box(np.random.default_rng(0), 1000, 1)
    (499.33..., 0.0, 500.66..., 1.0)
    """
    narrowest = math.log(_RATIO[0])
    widest = math.log(_RATIO[1])
    for _ in range(_TRIES):
        area = random.uniform(*_AREA) * width * height
        ratio = math.exp(random.uniform(narrowest, widest))
        wide = round(math.sqrt(area * ratio))
        high = round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = int(random.integers(width - wide + 1))
            upper = int(random.integers(height - high + 1))
            return left, upper, left + wide, upper + high
    wide = min(width, height * _RATIO[1])
    high = min(height, width / _RATIO[0])
    return _centered(width, height, wide, high)


def middle_box(width: int, height: int) -> Box:
    """The square in the middle without its margin.

    >>> middle_box(256, 512)
    (16.0, 144.0, 240.0, 368.0)
    """
    side = min(width, height) / MARGIN
    return _centered(width, height, side, side)


def _centered(width: int, height: int, wide: float, high: float) -> Box:
    left = (width - wide) / 2
    right = (width + wide) / 2
    upper = (height - high) / 2
    lower = (height + high) / 2
    return left, upper, right, lower


def _decoded(picture: Picture) -> Any:
    module = imported('PIL.Image', 'images')
    errors = OSError, SyntaxError, ValueError, module.DecompressionBombError
    try:
        image = module.open(io.BytesIO(picture.content))
        return image.convert('RGB')
    except errors as error:
        raise DataError(
            f'{picture.name} cannot be read as an image ({error}): {DOWNLOAD_AGAIN}'
        ) from error


def _resized(image: Any, box: Box, size: int) -> np.ndarray:
    bilinear = imported('PIL.Image', 'images').Resampling.BILINEAR
    resized = image.resize((size, size), bilinear, box=box)
    return np.asarray(resized)
