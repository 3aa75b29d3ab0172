"""Memory stays low however large the file: measured in a process of its own, against one with a small file."""

import ml_dtypes
import numpy as np
import pytest

from helpers import peak_memory
from jaxpruner.checkpoints import Leaf, SafetensorsWriter, write_safetensors

TENSORS, TENSOR_BYTES = 8, 2**25  # 256 MB in all
SHAPE = (4096, TENSOR_BYTES // 2 // 4096)

COMMAND = """
from jaxpruner.cli.main import main
status = main(sys.argv[1:])
"""

pytestmark = [pytest.mark.slow, peak_memory.needs_status]


def peak_mebibytes(*arguments):
    return peak_memory.peak_mebibytes(COMMAND, *arguments)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('memory')
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    weights = np.random.default_rng(0).standard_normal(SHAPE, np.float32).astype(bfloat16)
    leaves = {f'layer.{i}.weight': Leaf(SHAPE, bfloat16) for i in range(TENSORS)}
    with SafetensorsWriter(folder / 'large.safetensors', leaves) as writer:
        for name in leaves:
            writer.write(name, weights)
    write_safetensors(folder / 'small.safetensors', {'w': weights[:64, :64]})
    return folder


@pytest.mark.parametrize(
    'how', [['--sparsity', '0.8'], ['--sparsity', '0.8', '--types', 'block_4,4']]
)
def test_pruning_holds_a_part_of_a_tensor(files, how):
    peaks = [
        peak_mebibytes(
            'prune', files / f'{name}.safetensors', *how, '--overwrite', '--out', files / 'out'
        )
        for name in ('small', 'large')
    ]
    # Parts in NumPy and JAX, not a tensor (32 MB) in several dtypes, let alone the file.
    assert peaks[1] - peaks[0] < 130


def test_inspection_holds_a_part_of_a_tensor(files):
    small, large = (
        peak_mebibytes('inspect', files / f'{name}.safetensors') for name in ('small', 'large')
    )
    assert large - small < 60
