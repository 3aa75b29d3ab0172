"""Schedules: when they are due, what they reach, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparsity_schedules as schedules

DUE = {
    'never': (schedules.NoUpdateSchedule(), []),
    'once': (schedules.OneShotSchedule(7), [7]),
    'a list of steps': (schedules.StepsSchedule([3, 11]), [3, 11]),
    'from the start': (schedules.PeriodicSchedule(5), [0, 5, 10, 15]),
    'both ends included': (schedules.PeriodicSchedule(5, 5, 15), [5, 10, 15]),
    'multiples of the period, not of the start': (schedules.PeriodicSchedule(5, 6, 16), [10, 15]),
    'polynomial': (schedules.PolynomialSchedule(5, 5, 10), [5, 10]),
    'one step': (schedules.PolynomialSchedule(5, 10, 10), [10]),
}


@pytest.mark.parametrize(('schedule', 'steps'), DUE.values(), ids=DUE)
def test_due_steps(schedule, steps, monkeypatch):
    traced = jax.jit(jax.vmap(lambda step: jnp.asarray(schedule.is_mask_update_iter(step))))
    assert np.flatnonzero(traced(jnp.arange(20))).tolist() == steps
    assert schedule.is_mask_update_iter(None) is False
    reached = schedule.get_sparsity_at_step({'a': 0.8, 'b': None}, jnp.int32(100))
    assert reached == {'a': pytest.approx(0.8), 'b': None}
    # The host is answered without a device.
    monkeypatch.setattr(schedules, 'jnp', None)
    for kind in (int, np.uint8, np.int64):
        answers = [schedule.is_mask_update_iter(kind(step)) for step in range(20)]
        assert {type(answer) for answer in answers} == {bool}
        assert [step for step, answer in enumerate(answers) if answer] == steps


# Step -> sparsity by hand of a cubic from 0.5 to 0.9 over steps 0 to 9: after a share t, 0.5 + 0.4 (1 - (1 - t)³).
CUBIC = {-1: 0.5, 0: 0.6084, 4: 0.85, 8: 0.8996, 9: 0.9, 50: 0.9}


@pytest.mark.parametrize(('step', 'sparsity'), CUBIC.items())
def test_polynomial_may_begin_at_a_sparsity(step, sparsity):
    schedule = schedules.PolynomialSchedule(1, 0, 10, initial_sparsity=0.5)
    targets = {'pruned further': 0.9, 'at it': 0.5, 'below it': 0.3, 'whole': 0.0, 'dense': None}
    reached = schedule.get_sparsity_at_step(targets, jnp.int32(step))
    assert reached == pytest.approx(targets | {'pruned further': sparsity}, abs=1e-6)
    square = schedules.PolynomialSchedule(1, 0, 10, power=2).get_sparsity_at_step(0.9, step)
    done = min((step + 1) / 10, 1)
    assert float(square) == pytest.approx(0.9 * (1 - (1 - done) ** 2))


@pytest.mark.parametrize('number', [4e5, np.int64(4e5), jnp.float32(4e5)])
def test_whole_numbers_of_any_kind_are_steps(number):
    expected = schedules.PolynomialSchedule(400000, 0, 400000)
    assert schedules.PolynomialSchedule(number, 0.0, number) == expected
    for schedule in (schedules.OneShotSchedule(number), schedules.StepsSchedule((number,))):
        assert schedule.is_mask_update_iter(400000) is True


PERIODIC, POLYNOMIAL = schedules.PeriodicSchedule, schedules.PolynomialSchedule
BAD = [
    (lambda: PERIODIC(0), 'update_freq must be from 1 to .*, got 0'),
    (lambda: PERIODIC(2.5), 'update_freq must be a whole number, got 2.5'),
    (lambda: PERIODIC(True), 'update_freq must be a whole number, got True'),
    (lambda: PERIODIC(np.array([2])), 'update_freq must be a whole number'),
    (lambda: PERIODIC(2, 0, 1e10), 'update_end_step must be from 0 to 2147483647'),
    (lambda: PERIODIC(2, -1), 'update_start_step must be from 0 to .*, got -1'),
    (lambda: PERIODIC(2, 9, 3), 'update_end_step=3 lies before update_start_step=9'),
    (lambda: POLYNOMIAL(2, 9), 'PolynomialSchedule needs update_end_step'),
    (lambda: POLYNOMIAL(2, 0, 9, power=0), 'power must be positive.*, got 0'),
    (lambda: POLYNOMIAL(2, 0, 9, initial_sparsity=1.5), r'initial_.* in \[0, 1\] .*1\.5'),
    (lambda: schedules.OneShotSchedule(-3), 'target_step must be from 0 to .*, got -3'),
]


@pytest.mark.parametrize(('make', 'message'), BAD)
def test_bad_settings(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
