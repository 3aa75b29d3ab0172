"""Which way a sweep trains its cells: measured, kept, or given."""

import json

import jax
import pytest

from jaxpruner.baselines import WORKLOADS, cell_mapping, mapping_choice
from jaxpruner.baselines.mapping_choice import (
    MappingChoice,
    measure_mappings,
    read_choice,
    settle_mapping,
)

LENET = WORKLOADS['lenet']
MEASURED = MappingChoice('vmap', 'measured', {'each': 1.0, 'map': 0.98, 'vmap': 0.61})


@pytest.mark.parametrize(
    ('seconds', 'over'),
    [
        ({'each': [1, 1, 1], 'map': [1, 1, 1], 'vmap': [2, 2, 2]}, 'each'),
        ({'each': [1, 1, 1], 'map': [0.96, 0.96, 0.96], 'vmap': [2, 2, 2]}, 'each'),
        ({'each': [1, 1, 1], 'map': [0.9, 0.9, 0.9], 'vmap': [0.8, 0.8, 0.8]}, 'vmap'),
        # A round in which the whole machine was slow says nothing.
        ({'each': [1, 9, 1], 'map': [0.9, 8.1, 0.9], 'vmap': [1.1, 0.5, 1.1]}, 'map'),
    ],
)
def test_one_after_another_stays_unless_a_way_is_clearly_faster(seconds, over):
    choice = mapping_choice.pick_fastest(seconds)
    assert choice.mapping == over
    assert choice.ratios['each'] == 1


class Clock:
    """Time that passes in steps of training alone; programs are compiled in no time."""

    def __init__(self, seconds):
        self.seconds, self.now, self.calls = seconds, 0.0, []

    def perf_counter(self):
        return self.now

    def run_of(self, common, over, cells):
        def run(steps):
            self.now += steps * cells * self.seconds[over]
            self.calls.append((over, steps))

        return run


def test_ways_are_measured_in_turns(monkeypatch):
    clock = Clock({'each': 1e-3, 'map': 1e-3, 'vmap': 5e-4})
    monkeypatch.setattr(mapping_choice, 'time', clock)
    monkeypatch.setattr(mapping_choice, '_run_of', clock.run_of)
    monkeypatch.setattr(mapping_choice, 'available_mappings', lambda: tuple(clock.seconds))
    assert measure_mappings(LENET, LENET.default('default'), None, 4).mapping == 'vmap'
    rounds = clock.calls[-3 * mapping_choice._ROUNDS :]
    assert [over for over, _ in rounds[:6]] == ['each', 'map', 'vmap', 'map', 'vmap', 'each']
    (steps,) = {steps for _, steps in rounds}
    assert steps * 4e-3 >= mapping_choice._SECONDS
    few = LENET.default('default').updated({'steps': 3})
    measure_mappings(LENET, few, None, 4)
    assert {steps for _, steps in clock.calls[-3 * mapping_choice._ROUNDS :]} == {3}


def test_what_a_folder_keeps(tmp_path, monkeypatch):
    measured = []

    def measure():
        measured.append(1)
        return MEASURED

    assert settle_mapping(tmp_path, None, measure) == MappingChoice('map', 'default')
    assert settle_mapping(tmp_path, 'each', measure) == MappingChoice('each', 'given')
    assert settle_mapping(tmp_path, None, measure) == MappingChoice('each', 'given')
    assert not measured
    for wanted in ('auto', 'auto', None):
        assert settle_mapping(tmp_path, wanted, measure) == read_choice(tmp_path) == MEASURED
    assert len(measured) == 1
    assert (
        MEASURED.words()
        == 'over vmap (measured: times one after another, each 1.00, map 0.98, vmap 0.61)'
    )
    # What was chosen where there were more devices is chosen again.
    path = tmp_path / 'over.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'over': 'devices'}))
    monkeypatch.setattr(mapping_choice, 'available_mappings', lambda: ('each', 'map', 'vmap'))
    assert settle_mapping(tmp_path, None, measure) == MappingChoice('map', 'default')
    assert [path.name for path in tmp_path.iterdir()] == ['over.json']


def test_a_single_cell_says_nothing_of_many(tmp_path):
    alone = measure_mappings(LENET, LENET.default('default'), None, 1)
    assert settle_mapping(tmp_path, 'auto', lambda: alone).mapping == 'each'
    assert settle_mapping(tmp_path, 'auto', lambda: MEASURED) == MEASURED


def test_a_backend_of_which_nothing_is_known_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert settle_mapping(tmp_path, None, lambda: MEASURED) == MEASURED


@pytest.mark.parametrize(
    'content', ['', '{', '[]', '{"over": "map"}', '{"over": "pmap", "reason": "given"}', '"map"']
)
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / 'over.json').write_text(content)
    with pytest.raises(
        ValueError, match=r'over\.json does not say how cells are trained \(.*\): delete it'
    ):
        settle_mapping(tmp_path, None, lambda: MEASURED)


def test_ways_that_are_refused(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="cells are trained over each, map, vmap, devices, got 'pmap'"
    ):
        settle_mapping(tmp_path, 'pmap', lambda: MEASURED)
    monkeypatch.setattr(cell_mapping, 'available_mappings', lambda: ('each', 'map', 'vmap'))
    with pytest.raises(
        ValueError, match=r"over 'devices' needs more than one device, here is 1; .*XLA_FLAGS"
    ):
        settle_mapping(tmp_path, 'devices', lambda: MEASURED)
    assert not list(tmp_path.iterdir())
