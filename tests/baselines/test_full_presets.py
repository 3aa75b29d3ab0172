"""The presets `full` train on files, through the command line and with tiny sizes: data, model, sweep and resuming."""

import json

import jax
import numpy as np
import pytest

from helpers import eight_devices, files_of_data
from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.programs import FeedTraining
from jaxpruner.baselines.sweeps import Interrupted, Sweep, plan
from jaxpruner.cli.main import main
from jaxpruner.report.results import read_cells

TRAINING = {
    'steps': 4,
    'eval_every': 0.5,
    'batch_size': 8,
    'pruning': {'start': 0.0, 'frequency': 0.25},
}
IMAGES = {'image_size': 8, 'classes': 2}
TINY = {
    'resnet': {
        'task': IMAGES,
        'model': {'stages': [1], 'width': 4, 'bottleneck': False, 'large_stem': False},
    },
    'vit': {
        'task': IMAGES,
        'model': {'patch': 4, 'width': 8, 'layers': 1, 'heads': 2, 'hidden': 8},
    },
    't5': {
        'task': {'length': 20, 'test_examples': 6},
        'model': {
            'vocabulary': 0,
            'width': 8,
            'heads': 2,
            'head_width': 4,
            'mlp_width': 8,
            'layers': 1,
        },
    },
    'federated': {
        'task': {'clients_per_round': 2, 'local_steps': 2},
        'model': {'filters': [2, 2], 'hidden': 4},
        'batch_size': 4,
    },
}
FILES = {
    'resnet': files_of_data.image_folder,
    'vit': files_of_data.image_records,
    't5': files_of_data.parquet_files,
    'federated': files_of_data.fedjax_clients,
}


def settings(changes, prefix=''):
    for key, value in changes.items():
        if isinstance(value, dict):
            yield from settings(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}={json.dumps(value)}'


@pytest.mark.parametrize('name', TINY)
def test_the_command_trains(name, tmp_path, capsys):
    (tmp_path / 'data').mkdir()
    FILES[name](tmp_path / 'data')
    changes = [*settings(TRAINING), *settings(TINY[name])]
    command = [
        'run',
        name,
        '--preset',
        'full',
        '--data-dir',
        str(tmp_path / 'data'),
        '--out',
        str(tmp_path / 'out'),
    ]
    assert main([*command, '--sparsity', '0.5', '--set', *changes]) == 0, capsys.readouterr().err
    (cell,) = read_cells(tmp_path / 'out')
    assert abs(cell.reached - 0.5) < 0.05
    assert np.isfinite(cell.value)


def resnet(folder, **changes):
    workload = WORKLOADS['resnet']
    files_of_data.image_folder(folder, train=24)
    recipe = workload.default('full').updated(TRAINING).updated(TINY['resnet']).updated(changes)
    return workload, recipe, workload.data(recipe, folder)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    workload, recipe, data = resnet(tmp_path / 'data')
    cells, results = plan(['rigl'], [0.5], [0]), {}
    for name, stops in (('undisturbed', False), ('stopped', True)):
        out = tmp_path / name
        try:
            Sweep(workload, recipe, data, out).run(cells, should_stop=lambda stops=stops: stops)
        except Interrupted:
            Sweep(workload, recipe, data, out).run(cells)
        (cell,) = read_cells(out)
        results[name] = cell.value, cell.metrics, cell.layers
    assert results['stopped'] == results['undisturbed']


def test_the_loss_falls_in_bfloat16_and_parameters_stay_float32(tmp_path):
    optimizer = {'name': 'adam', 'learning_rate': 0.03, 'weight_decay': 0.0}
    workload, recipe, data = resnet(
        tmp_path, steps=25, optimizer=optimizer, schedule={'decay': 'constant', 'warmup': 0.0}
    )
    assert recipe.dtype == 'bfloat16'
    training = FeedTraining(workload, recipe, data, 'magnitude')
    targets = training.targets([0.5])
    training.open([0])
    carries = training.start(targets, [0])
    before = training.report(targets, carries)[0]
    after = training.advance(targets, carries, 0, recipe.steps)
    training.close()
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(after.params)} == {'float32'}
    metrics = training.report(targets, after)[0]
    assert metrics['loss'][0] < 0.7 * before['loss'][0]
    assert metrics['accuracy'] == [1.0]


@pytest.mark.parametrize(
    ('name', 'changes', 'message'),
    [
        ('resnet', {'task': {'classes': 3}}, 'has 2 classes and task.classes is 3'),
        (
            'federated',
            {'task': {'clients_per_round': 5}},
            'clients_per_round must lie in 1 to 4, got 5',
        ),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, message, tmp_path):
    FILES[name](tmp_path)
    workload = WORKLOADS[name]
    recipe = workload.default('full').updated(TINY[name]).updated(changes)
    with pytest.raises(ValueError, match=message):
        workload.task(recipe, workload.data(recipe, tmp_path))


def check_images_are_spread_over_the_devices(tmp_path, monkeypatch):
    workload, recipe, data = resnet(tmp_path, dtype='float32')
    found = {}
    for devices in (8, 1):
        monkeypatch.setattr(jax, 'local_device_count', lambda devices=devices: devices)
        training = FeedTraining(workload, recipe, data, 'magnitude')
        targets = training.targets([0.5])
        training.open([0])
        carries = training.advance(targets, training.start(targets, [0]), 0, recipe.steps)
        training.close()
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(carries.params)} == {
            devices
        }
        found[devices] = carries.params, carries.state, training.report(targets, carries)
    for one, eight in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[8]), strict=True):
        np.testing.assert_allclose(one, eight, rtol=1e-3, atol=1e-4)
    masks = [found[devices][2][1] for devices in (1, 8)]
    jax.tree.map(np.testing.assert_array_equal, *masks)
    assert masks[0]


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)
