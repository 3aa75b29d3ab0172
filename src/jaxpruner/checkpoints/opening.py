"""Opens what lies under a path, whatever the format of the checkpoint."""

import os
from pathlib import Path

from jaxpruner.checkpoints.base import Checkpoint
from jaxpruner.checkpoints.safetensors_reader import INDEX_NAME, SafetensorsFile, ShardedSafetensors
from jaxpruner.files import input_files
from jaxpruner.files.system_errors import errors_named

_INDEX_ENDING = '.safetensors.index.json'
# In a step's folder orbax keeps what it saved under a name, this one by default.
_ORBAX_ITEMS = ('.', 'default')


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a checkpoint; reads names, shapes and dtypes, no weights.

    Args:
      path: a `.safetensors` file; a folder with such a file or with a `model.safetensors.index.json`, or that index; or
        a folder that orbax wrote.

    Raises:
      ValueError: it is none of these, or only a part of one.
      FileNotFoundError: there is nothing under the path.
      OSError: it cannot be read, or is a pipe or a device; the error names it.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxpruner.checkpoints import write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.ones((2, 3))})
    ...     open_checkpoint(folder).leaves
    {'w': Leaf(shape=(2, 3), dtype=dtype('float64'))}
    """
    path = Path(path)
    input_files.check_exists(path)
    if path.is_dir():
        return _open_folder(path)
    return ShardedSafetensors(path) if path.name.endswith(_INDEX_ENDING) else SafetensorsFile(path)


def _open_folder(path: Path) -> Checkpoint:
    with errors_named(path):
        os.scandir(path).close()  # raises where glob would find nothing
    files = sorted(path.glob('*.safetensors'))
    indexes = sorted(path.glob(f'*{_INDEX_ENDING}'))
    if len(indexes) == 1:
        return ShardedSafetensors(indexes[0])
    if len(files) == 1 and not indexes:
        return SafetensorsFile(files[0])
    if files or indexes:
        names = ', '.join([file.name for file in indexes or files][:4])
        raise ValueError(f'{path} has several safetensors files ({names}); name one of them')
    if 'orbax-checkpoint-tmp' in path.name:
        raise ValueError(
            f'{path} is a checkpoint that orbax has not finished writing; use a finished one'
        )
    for item in _ORBAX_ITEMS:
        if (path / item / '_METADATA').is_file():
            from jaxpruner.checkpoints import orbax_folder  # orbax takes seconds to load

            return orbax_folder.OrbaxFolder(path / item)
    raise ValueError(
        f'{path} is no checkpoint: it has no *.safetensors, no {INDEX_NAME}, and no _METADATA of orbax'
        f'{_steps_hint(path)}'
    )


def _steps_hint(path: Path) -> str:
    """Names the last steps in a folder of orbax's CheckpointManager."""
    steps = [entry.name for entry in path.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    if not steps:
        return ''
    steps.sort(key=int)
    return f'; it has the steps {", ".join(steps[-4:])}: name one of these folders'
