"""Pictures in folders of their classes, `train/<class>/*.JPEG` and `val/<class>/*.JPEG`."""

import os
from pathlib import Path

from jaxpruner.baselines.data import DataError
from jaxpruner.baselines.readers.pictures import Picture

SUFFIXES = '.jpeg', '.jpg', '.png'


class ImageFolder:
    """A reader of the pictures of a folder that has one folder for each class.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / 'cat').mkdir()
    ...     _ = (Path(folder) / 'cat' / '1.png').write_bytes(b'pixels')
    ...     reader = ImageFolder(Path(folder))
    ...     len(reader), reader[0].content
    (1, b'pixels')
    """

    def __init__(self, folder: Path, classes: tuple[str, ...] | None = None):
        """Lists the files; classes are in the order of their labels, by default sorted.

        Raises a `DataError` for a class without pictures, or without a folder.
        """
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.classes = tuple(names) if classes is None else classes
        for name in {*self.classes} ^ {*names}:
            difference = f'a folder {name} that the training part lacks'
            if name in self.classes:
                difference = f'no folder {name}'
            raise DataError(
                f'{folder} has {difference}: both parts need the same classes, one folder each'
            )
        self._folder = folder
        self._files: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            files = sorted(os.listdir(folder / name))
            files = [file for file in files if file.lower().endswith(SUFFIXES)]
            if not files:
                raise DataError(
                    f'{folder / name} holds no images ({", ".join(SUFFIXES)}): put those of its '
                    'class there'
                )
            self._files += [(f'{name}/{file}', label) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Picture:
        name, label = self._files[index]
        path = self._folder / name
        try:
            return Picture(str(path), path.read_bytes(), label)
        except OSError as error:
            raise DataError(f'{path} cannot be read ({error}): put it back') from error
