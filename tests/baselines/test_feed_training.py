"""Tasks whose batches come from the host: resumed bit for bit, spread over devices, evaluated in three ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eight_devices
from helpers.tiny_feed import RECIPE, TinyFeed, TinyWorkload
from jaxpruner.baselines.checkpointing import Checkpoints
from jaxpruner.baselines.programs import FeedTraining
from jaxpruner.baselines.sweeps import Interrupted, Sweep, plan
from jaxpruner.report.results import read_cells

CELLS = plan(['set'], [0.5], [3, 4])


def trained(workload, recipe=RECIPE, algorithm='set', steps=RECIPE.steps):
    training = FeedTraining(workload, recipe, None, algorithm)
    targets = training.targets([0.5])
    feed = training.open([3])
    carries = training.advance(targets, training.start(targets, [3]), 0, steps)
    training.close()
    assert feed.is_closed
    return training, targets, carries


def content(out):
    return {cell.name: (cell.value, cell.metrics, cell.layers) for cell in read_cells(out)}


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed')
    Sweep(TinyWorkload(wants_values=True), RECIPE, None, out).run(CELLS)
    return content(out)


def test_a_sweep_trains_one_cell_after_the_other(tmp_path):
    seen = []
    sweep = Sweep(TinyWorkload(), RECIPE, None, tmp_path)
    sweep.run(CELLS, lambda group, step: seen.append((group[0].seed, step)))
    assert seen == [(seed, step) for seed in (3, 4) for step in (2, 4, 6, 8)]
    assert not list((tmp_path / 'checkpoints').iterdir())


class Killed(BaseException):
    """Nothing that the sweep could catch."""


@pytest.mark.parametrize(
    'place', ['between chunks', 'before the checkpoint', 'in the feed', 'behind the checkpoint']
)
def test_a_killed_run_goes_on_bit_for_bit(place, undisturbed, tmp_path, monkeypatch):
    kills, made = 0, TinyFeed.made

    def killing_every(calls, before, after=lambda *_: None):
        count = [0]

        def call(*arguments):
            nonlocal kills
            before(*arguments)
            count[0] += 1
            if count[0] % calls == 0:
                kills += 1
                raise Killed
            after(*arguments)

        return call

    save, save_feed = Checkpoints.save, TinyFeed.save
    sweep = Sweep(TinyWorkload(wants_values=True), RECIPE, None, tmp_path)
    for _ in range(20):
        with monkeypatch.context() as patch:
            on_chunk = (
                killing_every(1, lambda *_: None) if place == 'between chunks' else lambda *_: None
            )
            if place == 'before the checkpoint':
                patch.setattr(Checkpoints, 'save', killing_every(2, lambda *_: None, save))
            elif place == 'in the feed':
                patch.setattr(TinyFeed, 'save', killing_every(2, save_feed))
            elif place == 'behind the checkpoint':
                patch.setattr(Checkpoints, 'save', killing_every(1, save))
            try:
                sweep.run(CELLS[:1], on_chunk)
                break
            except Killed:
                assert kills
    assert kills >= 3
    assert TinyFeed.made - made > kills
    assert content(tmp_path) == {CELLS[0].name: undisturbed[CELLS[0].name]}
    assert not list((tmp_path / 'checkpoints').iterdir())


def test_a_feed_whose_position_is_lost_begins_again(undisturbed, tmp_path):
    sweep = Sweep(TinyWorkload(wants_values=True), RECIPE, None, tmp_path)
    with pytest.raises(Interrupted):
        sweep.run(CELLS, should_stop=lambda: True)
    (position,) = tmp_path.glob('checkpoints/*/*/feed')
    (position / 'state.json').write_text('{')
    with pytest.warns(UserWarning, match='000000 cannot be resumed from'):
        sweep.run(CELLS)
    (aside,) = tmp_path.glob('checkpoints/*/*')
    assert aside.name == '000000.corrupt'
    assert (aside / 'feed' / 'state.json').read_text() == '{'
    assert content(tmp_path) == undisturbed


def test_bfloat16_trains_and_parameters_stay_float32():
    workload = TinyWorkload(evaluates='tests')
    recipe = RECIPE.updated({'dtype': 'bfloat16', 'steps': 200})
    training, targets, carries = trained(workload, recipe, 'no_prune', steps=200)
    before = training.report(targets, training.start(targets, [3]))[0]['error']
    assert training.report(targets, carries)[0]['error'] < 0.05 * before
    assert {leaf.dtype for leaf in jax.tree.leaves(carries.params)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('evaluates', ['here', 'tests', 'host'])
def test_the_three_ways_of_evaluating(evaluates):
    workload = TinyWorkload(evaluates=evaluates)
    training = FeedTraining(workload, RECIPE, None, 'set')
    targets = training.targets([0.5])
    carries = training.start(targets, [3])
    training.open([3])
    kernel = np.asarray(carries.params['kernel'][0])
    inputs = np.random.default_rng(99).normal(size=(37, 8)).astype(np.float32)
    expected = {
        'here': np.abs(kernel[:2] - np.eye(2)).sum(),
        'tests': (
            (inputs @ kernel - inputs[:, :2]) ** 2
        ).mean(),  # 37 examples in batches of 16, the last filled up
        'host': np.abs(kernel[:2] - np.eye(2)).sum() + 3,
    }
    metrics, masks = training.report(targets, carries)
    np.testing.assert_allclose(metrics['error'], [expected[evaluates]], rtol=1e-5)
    assert masks['kernel'].shape == (1, 8, 2)
    assert training.prunable() == {'kernel': 16}


def test_cells_with_a_feed_are_trained_one_after_another(tmp_path):
    with pytest.raises(ValueError, match=r"over 'vmap': batches of .* come from the host"):
        Sweep(TinyWorkload(), RECIPE, None, tmp_path, mapping='vmap').run(CELLS)


def check_the_batch_is_spread_over_the_devices(monkeypatch):
    assert jax.local_device_count() == 8
    workload = TinyWorkload(wants_values=True, evaluates='tests')
    training, targets, carries = trained(workload)
    assert len(carries.params['kernel'].sharding.device_set) == 8
    with pytest.warns(UserWarning, match='1 of 8 devices are used: batches of 7 examples'):
        trained(workload, RECIPE.updated({'batch_size': 7}), steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(jax, 'local_device_count', lambda: 1)
        alone, _, carries_alone = trained(workload)
        metrics_alone, masks_alone = alone.report(targets, carries_alone)
    metrics, masks = training.report(targets, carries)
    np.testing.assert_allclose(
        carries.params['kernel'], carries_alone.params['kernel'], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_array_equal(masks['kernel'], masks_alone['kernel'])
    np.testing.assert_allclose(metrics['error'], metrics_alone['error'], rtol=1e-4)


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)
