"""Packed files: their bytes against zip, zstd and the dense file, seconds against writing the dense bytes, and memory.

Zip and zstd (where a module of that name is installed) compress the dense safetensors file at their default levels.
Writing ends when the bytes are on the disk; loading reads a file that the system may still hold in memory.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.report import Row
from benchmarks.timing import interleaved, ratio
from jaxpruner import sparse
from jaxpruner.checkpoints import Leaf, write_safetensors
from jaxpruner.sparse.formats import table
from jaxpruner.sparse.formats.leaf_arrays import Kept

ROUNDS = 3
HAS_ZSTD = importlib.util.find_spec('zstandard') is not None
COLUMNS = (
    'share of the dense file',
    'over the least format',
    'zip takes times as many bytes',
    *(('zstd takes times as many bytes',) if HAS_ZSTD else ()),
    'saving takes times as long as writing dense',
    'loading takes times as long as writing dense',
    'peak MiB',
)
# Length of a leaf's axes for bytes; leaves of [1024, 1024] for seconds, and for memory.
SIZES = {'small': (128, 2, 2), 'cpu': (2048, 256, 512), 'gpu': (4096, 256, 512)}
_LEAF_SIDE = 1024
_LEAVES_AT_A_TIME = 16  # are one leaf of the tree whose memory is measured
_DTYPES = {'float32': np.dtype('float32'), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


def scattered(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Masks that keep a share, anywhere."""
    return lambda rng, side: rng.random((side, side), np.float32) < share


def two_of_four(rng: np.random.Generator, side: int) -> np.ndarray:
    """Masks of 2:4 along the last axis."""
    ranks = rng.random((side, side // 4, 4), np.float32).argsort(-1)
    return (ranks < 2).reshape(side, side)


def wide_blocks(rng: np.random.Generator, side: int) -> np.ndarray:
    """Masks that keep a tenth of blocks of 8 by 128."""
    grid = rng.random((side // 8, side // 128)) < 0.1
    grid[0, 0] = True
    return grid.repeat(8, 0).repeat(128, 1)


MASKS = {
    **{f'{sparsity:.0%}': scattered(1 - sparsity) for sparsity in (0.5, 0.8, 0.9, 0.95, 0.98)},
    '2:4': two_of_four,
    '90% in blocks of 8x128': wide_blocks,
}
_TIMED = ('50%', '90%', '2:4', '90% in blocks of 8x128')


def run(size: str, rounds: int) -> list[Row]:
    """Measures bytes, seconds and memory, in folders that are removed."""
    side, timed_leaves, leaves_of_memory = SIZES[size]
    rows = []
    with tempfile.TemporaryDirectory(prefix='storage') as name:
        folder = Path(name)
        for mask_name, make_mask in MASKS.items():
            for dtype_name, dtype in _DTYPES.items():
                array = _pruned(make_mask, side, dtype)
                values = _bytes_against_others(array, folder)
                rows.append(_row(f'{mask_name}, [{side}, {side}] {dtype_name}', values))
        for mask_name in _TIMED:
            tree = _tree(MASKS[mask_name], timed_leaves)
            megabytes = sum(leaf.nbytes for leaf in tree.values()) / 2**20
            values = _seconds(tree, folder, rounds)
            rows.append(_row(f'{mask_name}, {megabytes:.0f} MiB', values))
    megabytes = leaves_of_memory * _LEAF_SIDE**2 * 4 / 2**20
    values = {'peak MiB': _peak_elsewhere(leaves_of_memory)}
    rows.append(_row(f'90%, a lazily made tree of {megabytes:.0f} MiB, saved and loaded', values))
    return rows


def _row(name: str, values: Mapping[str, Any]) -> Row:
    return Row(name, tuple([values.get(column) for column in COLUMNS]))


def _pruned(
    make_mask: Callable[[np.random.Generator, int], np.ndarray], side: int, dtype: np.dtype
) -> np.ndarray:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((side, side), np.float32)
    return np.where(make_mask(rng, side), weights, 0).astype(dtype)


def _bytes_against_others(array: np.ndarray, folder: Path) -> dict[str, float]:
    dense, packed, zipped = (folder / name for name in ('dense', 'packed', 'zipped'))
    write_safetensors(dense, {'w': array})
    sparse.save(packed, {'w': array}, progress=False)
    with zipfile.ZipFile(zipped, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.write(dense)
    plans = table.plans_of(Kept(array != 0), array.itemsize)
    least = min(plan.bytes for plan in plans.values())
    size = packed.stat().st_size
    values = {
        'share of the dense file': size / dense.stat().st_size,
        'over the least format': size / least,
        'zip takes times as many bytes': zipped.stat().st_size / size,
    }
    if HAS_ZSTD:
        import zstandard

        compressed = len(zstandard.compress(dense.read_bytes()))
        values['zstd takes times as many bytes'] = compressed / size
    return values


def _tree(
    make_mask: Callable[[np.random.Generator, int], np.ndarray], count: int
) -> dict[str, np.ndarray]:
    leaf = _pruned(make_mask, _LEAF_SIDE, _DTYPES['float32'])
    return {str(number): leaf.copy() for number in range(count)}


def _seconds(tree: Mapping[str, np.ndarray], folder: Path, rounds: int) -> dict[str, Any]:
    dense, packed = folder / 'dense', folder / 'packed'

    def write_dense() -> None:
        with dense.open('wb') as file:
            for leaf in tree.values():
                file.write(leaf.data)
            file.flush()
            os.fsync(file.fileno())

    calls = {
        'dense': write_dense,
        'save': lambda: sparse.save(packed, tree, progress=False),
        'load': lambda: sparse.load(packed, progress=False),
    }
    calls['save']()
    times = interleaved(calls, rounds, warm=False)
    return {
        'saving takes times as long as writing dense': ratio(times['save'], times['dense']),
        'loading takes times as long as writing dense': ratio(times['load'], times['dense']),
    }


class MadeTree:
    """A checkpoint whose leaves are made when they are read."""

    path = Path('made')
    metadata: Mapping[str, str] = {}

    def __init__(self, count: int):
        shape = (_LEAVES_AT_A_TIME * _LEAF_SIDE, _LEAF_SIDE)
        names = [str(number) for number in range(-(-count // _LEAVES_AT_A_TIME))]
        self.leaves = dict.fromkeys(names, Leaf(shape, _DTYPES['float32']))

    def read(self, name: str, part: Any = None) -> np.ndarray:
        """Draws nine tenths of zeros, a few rows at a time."""
        assert part is None
        return np.concatenate([*self._rows(int(name))])

    def _rows(self, seed: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        for _ in range(_LEAVES_AT_A_TIME):
            rows = rng.standard_normal((_LEAF_SIDE, _LEAF_SIDE), np.float32)
            yield np.where(rng.random(rows.shape, np.float32) < 0.1, rows, np.float32(0))


def print_peak(count: int) -> None:
    """Saves and loads a tree leaf by leaf, and prints the most memory that this process had, in MiB."""
    with tempfile.TemporaryDirectory(prefix='storage') as folder:
        sparse.save(Path(folder, 'packed'), MadeTree(count), progress=False)
        file = sparse.open_packed(Path(folder, 'packed'))
        for name in file.leaves:
            file.read(name)
    # What `resource` says is not less than what the parent had.
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith('VmHWM'):
            print(int(line.split()[1]) / 1024)


def _peak_elsewhere(count: int) -> float:
    code = f'from benchmarks.storage import print_peak; print_peak({count})'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    return float(done.stdout)
