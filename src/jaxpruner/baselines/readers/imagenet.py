"""ImageNet in a folder: images in folders of their classes, or array-record files."""

from pathlib import Path
from typing import NamedTuple

from jaxpruner.baselines.data import DataError
from jaxpruner.baselines.readers.array_records import ArrayRecords
from jaxpruner.baselines.readers.image_folder import ImageFolder
from jaxpruner.baselines.readers.pictures import Picture
from jaxpruner.baselines.readers.pipelines import Reader

_FILES = (
    'train/<class>/*.JPEG and val/<class>/*.JPEG, or *train*.array_record* and '
    '*validation*.array_record*'
)


class ImageFiles(NamedTuple):
    """Readers of both parts."""

    train: Reader[Picture]
    test: Reader[Picture]
    classes: int | None  # None where files do not say


def read_imagenet(folder: Path) -> ImageFiles:
    """Finds the files; images are read when they are asked for."""
    if not folder.is_dir():
        raise DataError(f'{folder} is not a folder: pass one with {_FILES}')
    if (folder / 'train').is_dir() and (folder / 'val').is_dir():
        train = ImageFolder(folder / 'train')
        return ImageFiles(train, ImageFolder(folder / 'val', train.classes), len(train.classes))
    train = sorted(folder.glob('*train*.array_record*'))
    test = sorted(folder.glob('*validation*.array_record*'))
    if not (train and test):
        raise DataError(f'{folder} does not hold both parts of ImageNet: it needs {_FILES}')
    return ImageFiles(ArrayRecords(train), ArrayRecords(test), None)
