"""Schedules are those of the original JaxPruner (README.md beside this file)."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpruner import sparsity_schedules

CASES = json.loads((Path(__file__).parent / 'schedules.json').read_text())
SETTINGS = ('update_freq', 'update_start_step', 'update_end_step', 'power')


def test_the_cases_are_complete():
    assert len(CASES) == 4
    assert {case['schedule'] for case in CASES} == {'PolynomialSchedule'}


@pytest.mark.parametrize(
    'case', CASES, ids=lambda case: '-'.join(str(case[name]) for name in SETTINGS)
)
def test_schedules_are_equal(case):
    schedule = sparsity_schedules.PolynomialSchedule(**{name: case[name] for name in SETTINGS})
    assert case['columns'] == ['step', 'is_mask_update_iter', 'sparsity']
    for step, is_due, sparsity in case['rows']:
        count = jnp.int32(step)
        assert bool(schedule.is_mask_update_iter(count)) is is_due, f'step {step}'
        targets = {'kernel': jnp.float32(case['target']), 'bias': None}
        sparsities = schedule.get_sparsity_at_step(targets, count)
        assert sparsities['bias'] is None
        assert float(sparsities['kernel']) == pytest.approx(sparsity, abs=1e-6), f'step {step}'
