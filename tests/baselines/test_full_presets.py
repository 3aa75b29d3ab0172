"""The presets `full` train on files, through the command line and with tiny sizes."""

import json

import jax
import numpy as np
import pytest

from helpers import eight_devices, files_of_data
from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.programs import Programs, masks_by_path
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
    data, out = tmp_path / 'data', tmp_path / 'out'
    data.mkdir()
    FILES[name](data)
    command = ['run', name, '--preset', 'full', '--data-dir', str(data), '--out', str(out)]
    command += ['--sparsity', '0.5', '--set', *settings(TRAINING), *settings(TINY[name])]
    assert main(command) == 0, capsys.readouterr().err
    (cell,) = read_cells(out)
    assert abs(cell.reached - 0.5) < 0.05
    assert np.isfinite(cell.value)


def resnet(folder, **changes):
    workload = WORKLOADS['resnet']
    files_of_data.image_folder(folder, train=24)
    recipe = workload.default('full').updated(TRAINING).updated(TINY['resnet']).updated(changes)
    return workload, recipe, workload.data(recipe, folder)


def trained(programs, algorithm, steps):
    targets, feed = programs.targets(algorithm, [0.5]), programs.task.feed(0)
    carries = programs.start(algorithm, targets, [0])
    before = programs.report(algorithm, targets, carries, [0])
    carries = programs.advance(algorithm, targets, carries, 0, steps, feed)
    feed.close()
    return before, programs.report(algorithm, targets, carries, [0]), carries


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    settings = resnet(tmp_path / 'data')
    cells, results = plan(['rigl'], [0.5], [0]), []
    for name, stops in (('undisturbed', False), ('stopped', True)):
        sweep = Sweep(*settings, tmp_path / name)
        try:
            sweep.run(cells, should_stop=lambda stops=stops: stops)
        except Interrupted:
            sweep.run(cells)
        (cell,) = read_cells(tmp_path / name)
        results.append((cell.value, cell.metrics, cell.layers))
    assert results[0] == results[1]


def test_the_loss_falls_in_bfloat16_and_parameters_stay_float32(tmp_path):
    optimizer = {'name': 'adam', 'learning_rate': 0.03, 'weight_decay': 0.0}
    schedule = {'decay': 'constant', 'warmup': 0.0}
    workload, recipe, data = resnet(tmp_path, steps=25, optimizer=optimizer, schedule=schedule)
    assert recipe.dtype == 'bfloat16'
    before, after, carries = trained(Programs(workload, recipe, data), 'magnitude', 25)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(carries.params)} == {'float32'}
    assert after['loss'][0] < 0.7 * before['loss'][0]
    assert after['accuracy'] == [1.0]


@pytest.mark.parametrize(
    ('name', 'changes', 'message'),
    [
        ('resnet', {'task': {'classes': 3}}, 'has 2 classes and task.classes is 3'),
        ('federated', {'task': {'clients_per_round': 5}}, 'must lie in 1 to 4, got 5'),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, message, tmp_path):
    FILES[name](tmp_path)
    workload = WORKLOADS[name]
    recipe = workload.default('full').updated(TINY[name]).updated(changes)
    with pytest.raises(ValueError, match=message):
        workload.task(recipe, workload.data(recipe, tmp_path))


def check_images_are_spread_over_the_devices(tmp_path, monkeypatch):
    programs = Programs(*resnet(tmp_path, dtype='float32'))
    found = {}
    for devices in (8, 1):
        monkeypatch.setattr(jax, 'local_device_count', lambda devices=devices: devices)
        _, metrics, carries = trained(programs, 'magnitude', 4)
        leaves = jax.tree.leaves(carries.params)
        assert {len(leaf.sharding.device_set) for leaf in leaves} == {devices}
        found[devices] = carries.params, carries.state, metrics
        found[devices, 'masks'] = masks_by_path(carries.opt_state)
    for one, eight in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[8]), strict=True):
        np.testing.assert_allclose(one, eight, rtol=1e-3, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, found[1, 'masks'], found[8, 'masks'])


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)
