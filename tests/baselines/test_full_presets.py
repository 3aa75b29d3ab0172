"""The presets `full` train on files, through the command line and with tiny sizes."""

import numpy as np
import pytest

from helpers import files_of_data
from jaxpruner.baselines import WORKLOADS
from jaxpruner.cli.main import main
from jaxpruner.report.results import read_cells

TRAINING = {
    'steps': 4,
    'eval_every': 0.5,
    'batch_size': 8,
    'pruning': {'start': 0.0, 'frequency': 0.25},
}
IMAGES = {'image_size': 8, 'classes': 2}
RESNET = {'stages': [1], 'width': 4, 'bottleneck': False, 'large_stem': False}
VIT = {'patch': 4, 'width': 8, 'layers': 1, 'heads': 2, 'hidden': 8}
T5 = {'vocabulary': 0, 'width': 8, 'heads': 2, 'head_width': 4, 'mlp_width': 8, 'layers': 1}
TINY = {
    'resnet': {'task': IMAGES, 'model': RESNET},
    'vit': {'task': IMAGES, 'model': VIT},
    't5': {'task': {'length': 20, 'test_examples': 6}, 'model': T5},
    'federated': {
        'task': {'clients_per_round': 2, 'local_steps': 2},
        'model': {'filters': [2, 2], 'hidden': 4},
        'batch_size': 4,
    },
}
FILES = {
    'resnet': files_of_data.image_folder,
    'vit': files_of_data.image_folder,
    't5': files_of_data.parquet_files,
    'federated': files_of_data.fedjax_clients,
}


@pytest.mark.slow
@pytest.mark.parametrize('name', TINY)
def test_the_command_trains(name, tmp_path, capsys):
    data, out = tmp_path / 'data', tmp_path / 'out'
    data.mkdir()
    FILES[name](data)
    recipe = tmp_path / 'recipe.toml'
    WORKLOADS[name].default('full').updated(TRAINING).updated(TINY[name]).write(recipe)
    command = (
        f'run {name} --preset full --recipe {recipe} --data-dir {data} --out {out} --sparsity 0.5'
    )
    assert main(command.split()) == 0, capsys.readouterr().err
    (cell,) = read_cells(out)
    assert abs(cell.reached - 0.5) < 0.05
    assert np.isfinite(cell.value)


def test_images_of_other_classes_are_refused(tmp_path):
    files_of_data.image_folder(tmp_path)
    recipe = WORKLOADS['resnet'].default('full').updated({'task': {'classes': 3}})
    with pytest.raises(ValueError, match=r'has 2 classes and task\.classes is 3'):
        WORKLOADS['resnet'].data(recipe, tmp_path)
