"""Settings for all tests and doctests: compiled programs are shared, and what needs a missing library is left out."""

import importlib.util
import os
import shutil
import tempfile

collect_ignore = []
if importlib.util.find_spec('gymnax') is None:
    collect_ignore += ['src/jaxpruner/baselines/games.py', 'src/jaxpruner/baselines/minatar.py']
if importlib.util.find_spec('ale_py') is None:
    collect_ignore += ['src/jaxpruner/baselines/atari.py', 'src/jaxpruner/baselines/atari_feed.py']

_FOLDER = 'JAX_COMPILATION_CACHE_DIR'
_made = []


def pytest_configure():
    """What one process has compiled no other compiles again: workers, and processes that tests start, inherit this.

    The folder lives as long as the run, so that each run begins with nothing. To keep programs from run to run, name a
    folder yourself: `JAX_COMPILATION_CACHE_DIR=… bash run.sh`.
    """
    if _FOLDER not in os.environ:
        _made.append(tempfile.mkdtemp(prefix='jaxpruner_compiled_'))
        os.environ[_FOLDER] = _made[0]
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')


def pytest_unconfigure():
    """Removes the folder; the process that made it ends last."""
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)
