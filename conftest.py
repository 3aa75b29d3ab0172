"""Settings for all tests and doctests: programs compile quickly, and once; what needs a missing library is left out."""

import builtins
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

collect_ignore = []
if importlib.util.find_spec('ale_py') is None:
    collect_ignore += ['src/jaxpruner/baselines/atari.py']

_FLAGS = 'XLA_FLAGS'
# No optimizations by LLVM, and one piece for LLVM.
_QUICK = '--xla_backend_optimization_level=0', '--xla_cpu_parallel_codegen_split_count=1'
_CLIENT = [sys.executable, '-c', 'from jaxlib import xla_client; xla_client.make_cpu_client()']
# Programs are kept from run to run, so that a second run compiles only what has changed. JAX bounds no such folder.
_PROGRAMS = pathlib.Path(__file__).parent / '.pytest_cache' / 'compiled'
_MOST_BYTES = 4 << 30
# Linux gives a process 65,530 mappings; a compiled program takes six, and the process crashes where none is left.
_MOST_MAPPINGS = 30_000

# JAX reads these when it is imported, which other conftest files do.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_PROGRAMS))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')


def pytest_configure(config):
    """Workers, and processes that tests start, inherit what stands in the environment.

    Programs are compiled in a third of the time, most of a run's; `tests/compiling.py` says where they must be
    those of users. To compile them all so: `XLA_FLAGS= bash run.sh`.
    """
    if _FLAGS not in os.environ:
        # Not every release of XLA has every flag, and one that it does not know ends the process.
        known = []
        for flag in _QUICK:
            environment = os.environ | {_FLAGS: flag}
            run = subprocess.run(_CLIENT, env=environment, capture_output=True, check=False)
            known += [] if run.returncode else [flag]
        os.environ[_FLAGS] = ' '.join(known)
    if hasattr(config, 'workerinput') or not _PROGRAMS.exists():
        return
    if sum(file.stat().st_size for file in _PROGRAMS.iterdir()) > _MOST_BYTES:
        shutil.rmtree(_PROGRAMS)


def pytest_report_header():
    """Says which versions are tested."""
    packages = ('jax', 'flax', 'optax', 'numpy')
    return ', '.join(f'{name} {importlib.metadata.version(name)}' for name in packages)


def pytest_collection_finish():
    """What is imported stays, and need not be searched for garbage so often; old hypothesis bears no `gc.freeze`."""
    gc.collect()
    gc.set_threshold(50_000, 20, 50)


def pytest_runtest_teardown(item, nextitem):
    """Leaves what a test must not leave to those after it.

    Between two files, a process that holds many compiled programs lets them go.
    """
    if isinstance(item, pytest.DoctestItem):
        # What a doctest shows is kept as `_` among the builtins, all of which tyro hashes when it is imported. A tuple
        # of arrays cannot be hashed.
        vars(builtins).pop('_', None)
    if nextitem is None or nextitem.path == item.path or 'jax' not in sys.modules:
        return
    if _mappings() > _MOST_MAPPINGS:
        sys.modules['jax'].clear_caches()
        gc.collect()


def _mappings():
    """How many regions of memory this process has mapped; 0 where the system does not say."""
    try:
        with open('/proc/self/maps') as file:
            return sum(1 for _ in file)
    except OSError:
        return 0
