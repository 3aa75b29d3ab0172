"""A tree is saved and loaded within the memory of a leaf: measured in a process of its own, against a smaller tree."""

import pytest

from helpers import peak_memory

SAVE_AND_LOAD = """
import tempfile
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
"""


@pytest.mark.slow
@peak_memory.needs_status
def test_memory_does_not_grow_with_the_number_of_leaves():
    few, many = (peak_memory.peak_mebibytes(SAVE_AND_LOAD, leaves) for leaves in (2, 40))
    assert many - few < 20  # of 8 and 160 MiB
