"""A tree is saved and loaded within the memory of a leaf: measured in a process of its own, against a smaller tree."""

import subprocess
import sys

import pytest

pytest.importorskip('resource', reason='memory is measured with resource, which Windows has not')

PRINT_PEAK = """
import resource, sys, tempfile
import numpy as np
from jaxpruner import sparse
from jaxpruner.checkpoints import Leaf

class Made:
    path, metadata = 'made', {}
    leaves = {str(i): Leaf((1024, 1024), np.dtype('float32')) for i in range(int(sys.argv[1]))}

    def read(self, name, part=None):
        leaf = np.random.default_rng(int(name)).standard_normal((1024, 1024), np.float32)
        return np.where(MASK, leaf, np.float32(0))

MASK = np.random.default_rng(0).random((1024, 1024)) < 0.1
with tempfile.TemporaryDirectory() as folder:
    sparse.save(f'{folder}/a', Made())
    file = sparse.open_packed(f'{folder}/a')
    for name in file.leaves:
        file.read(name)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform != 'darwin' else 2**20))
"""


def peak_mebibytes(leaves):
    command = [sys.executable, '-c', PRINT_PEAK, str(leaves)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_leaves():
    few, many = peak_mebibytes(2), peak_mebibytes(40)  # 8 and 160 MiB
    assert many - few < 20
