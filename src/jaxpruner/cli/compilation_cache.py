"""Keeps what a training compiles in the user's cache folder, so that the next one loads it."""

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

from jaxpruner.caller_warnings import warn
from jaxpruner.files import file_locks

# Each holds unless its name in capitals stands in the environment.
_SETTINGS = {
    'jax_compilation_cache_max_size': 1 << 30,  # bytes; JAX then removes what was used least lately
    # JAX's own second leaves out most of a small model.
    'jax_persistent_cache_min_compile_time_secs': 0.1,
}
_UNBOUNDED = -1  # as a size
_LOCK_NAME = '.lockfile'  # that of JAX
_PROGRAM_ENDING = '-cache'
_USE_ENDING = '-atime'


def keep_programs() -> None:
    """Turns JAX's persistent compilation cache on, if the user has neither named a folder for it nor turned it off.

    A warning says why where the folder cannot be used.
    """
    config: Any = jax.config  # its names are made as JAX is loaded
    has_folder = config.jax_compilation_cache_dir is not None  # an empty name is one, too
    if has_folder or not config.jax_enable_compilation_cache:
        return
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            config.update(name, value)
    is_bounded = config.jax_compilation_cache_max_size != _UNBOUNDED
    folder = platformdirs.user_cache_path('jaxpruner', appauthor=False) / 'compiled'
    try:
        _make(folder)
        if is_bounded:
            importlib.import_module('filelock')  # JAX needs it to remove anything
            _remove_half_programs(folder)
    except (OSError, ImportError) as error:
        warn(
            f'compiled programs are not kept: {error}; name another folder with JAX_COMPILATION_CACHE_DIR, or say '
            '--no-compilation-cache'
        )
        return
    config.update('jax_compilation_cache_dir', str(folder))
    compilation_cache.reset_cache()  # JAX may have compiled something and found no folder


def _make(folder: Path) -> None:
    if not folder.is_absolute():
        raise FileNotFoundError(f'there is no home folder, and {folder} is no full path')
    # Whoever can write there can run code as this user.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _remove_half_programs(folder: Path) -> None:
    """Removes what a full disk or a killed process left: JAX can neither load it nor does it write it again.

    JAX writes a program, and then, to a second file, when it was used; without a bound there is no second file.
    """
    with (
        contextlib.suppress(BlockingIOError),  # another process reads or writes a program just now
        file_locks.locked(folder / _LOCK_NAME, folder),
    ):
        for program in folder.glob(f'*{_PROGRAM_ENDING}'):
            key = program.name.removesuffix(_PROGRAM_ENDING)
            if not (folder / f'{key}{_USE_ENDING}').exists():
                program.unlink(missing_ok=True)
