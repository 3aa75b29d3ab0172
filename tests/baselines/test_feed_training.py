"""Tasks whose batches come from the host: resumed bit for bit, spread over devices, evaluated in two ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eight_devices
from helpers.tiny_feed import RECIPE, TinyWorkload
from jaxpruner.baselines.checkpointing import Checkpoints
from jaxpruner.baselines.programs import Programs, masks_by_path
from jaxpruner.baselines.sweeps import Sweep, plan
from jaxpruner.report.results import read_cells

CELLS = plan(['set'], [0.5], [3, 4])


def trained(workload, recipe=RECIPE, algorithm='set', steps=RECIPE.steps):
    """The error before and after, and the carries."""
    programs = Programs(workload, recipe, None)
    targets, feed = programs.targets(algorithm, [0.5]), programs.task.feed(3)
    carries = programs.start(algorithm, targets, [3])
    before = programs.report(algorithm, targets, carries, [3])['error']
    carries = programs.advance(algorithm, targets, carries, 0, steps, feed)
    return before, programs.report(algorithm, targets, carries, [3])['error'], carries


def content(out):
    return {cell.name: (cell.value, cell.metrics, cell.layers) for cell in read_cells(out)}


class Killed(BaseException):
    """Nothing that the sweep could catch."""


def test_a_killed_sweep_goes_on_bit_for_bit_one_cell_after_the_other(tmp_path, monkeypatch):
    workload, seen, save = TinyWorkload(wants_values=True), [], Checkpoints.save
    recipe = RECIPE.updated({'eval_every': 0.5})
    Sweep(workload, recipe, None, tmp_path / 'whole').run(
        CELLS, lambda group, step: seen.append((group[0].seed, step))
    )
    assert seen == [(seed, step) for seed in (3, 4) for step in (4, 8)]
    assert not list((tmp_path / 'whole' / 'checkpoints').iterdir())
    kills = 0

    def save_and_die(*arguments):
        nonlocal kills
        save(*arguments)
        kills += 1
        raise Killed

    monkeypatch.setattr(Checkpoints, 'save', save_and_die)
    sweep = Sweep(workload, recipe, None, tmp_path / 'killed')
    while len(content(tmp_path / 'killed') if kills > 2 else ()) < 2:
        try:
            sweep.run(CELLS)
        except Killed:
            continue
    assert kills == 4
    assert content(tmp_path / 'killed') == content(tmp_path / 'whole')


def test_bfloat16_trains_and_parameters_stay_float32():
    recipe = RECIPE.updated({'dtype': 'bfloat16', 'steps': 200})
    before, after, carries = trained(TinyWorkload(), recipe, 'no_prune', 200)
    assert after < 0.05 * before
    assert {leaf.dtype for leaf in jax.tree.leaves(carries.params)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('evaluates', ['here', 'host'])
def test_the_two_ways_of_evaluating(evaluates):
    error, _, _ = trained(TinyWorkload(evaluates=evaluates), steps=0)
    programs = Programs(TinyWorkload(evaluates=evaluates), RECIPE, None)
    carries = programs.start('set', programs.targets('set', [0.5]), [3])
    kernel = np.asarray(carries.params['kernel'][0])
    expected = np.abs(kernel[:2] - np.eye(2)).sum() + (3 if evaluates == 'host' else 0)
    np.testing.assert_allclose(error, [expected], rtol=1e-5)
    assert masks_by_path(carries.opt_state)['kernel'].shape == (1, 8, 2)
    assert programs.prunable() == {'kernel': 16}


def check_the_batch_is_spread_over_the_devices(monkeypatch):
    found = {}
    for devices in (8, 1):
        monkeypatch.setattr(jax, 'local_device_count', lambda devices=devices: devices)
        workload = TinyWorkload(wants_values=True, evaluates='host')
        _, error, carries = trained(workload)
        assert len(carries.params['kernel'].sharding.device_set) == devices
        found[devices] = carries.params['kernel'], masks_by_path(carries.opt_state), error
    np.testing.assert_allclose(found[8][0], found[1][0], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found[8][1]['kernel'], found[1][1]['kernel'])
    np.testing.assert_allclose(found[8][2], found[1][2], rtol=1e-4)


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)
