"""Memory stays low however large the file: measured in a process of its own, against one with a small file."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxpruner.checkpoints import Leaf, SafetensorsWriter, write_safetensors

resource = pytest.importorskip(
    'resource', reason='memory is measured with resource, which Windows has not'
)

TENSORS, TENSOR_BYTES = 8, 2**25  # 256 MB in all
SHAPE = (4096, TENSOR_BYTES // 2 // 4096)

PRINT_PEAK = """
import resource, sys
from jaxpruner.cli.main import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 if sys.platform != 'darwin' else 1024))
sys.exit(status)
"""


def peak_megabytes(*arguments):
    command = [sys.executable, '-c', PRINT_PEAK, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout.split()[-1]) / 1024


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


@pytest.mark.slow
@pytest.mark.parametrize(
    'how', [['--sparsity', '0.8'], ['--sparsity', '0.8', '--types', 'block_4,4']]
)
def test_pruning_holds_a_part_of_a_tensor(files, how):
    peaks = [
        peak_megabytes(
            'prune', files / f'{name}.safetensors', *how, '--overwrite', '--out', files / 'out'
        )
        for name in ('small', 'large')
    ]
    # Parts in NumPy and JAX, not a tensor (32 MB) in several dtypes, let alone the file.
    assert peaks[1] - peaks[0] < 130


@pytest.mark.slow
def test_inspection_holds_a_part_of_a_tensor(files):
    small, large = (
        peak_megabytes('inspect', files / f'{name}.safetensors') for name in ('small', 'large')
    )
    assert large - small < 60
