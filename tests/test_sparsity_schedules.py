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
def test_due_steps(schedule, steps):
    assert [step for step in range(20) if schedule.is_mask_update_iter(step)] == steps
    traced = jax.jit(jax.vmap(lambda step: jnp.asarray(schedule.is_mask_update_iter(step))))(
        jnp.arange(20)
    )
    assert np.flatnonzero(traced).tolist() == steps


@pytest.mark.parametrize(
    'kind', [int, np.int32, np.uint8, np.int64], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize(('schedule', 'steps'), DUE.values(), ids=DUE)
def test_the_host_is_answered_without_a_device(schedule, steps, kind, monkeypatch):
    monkeypatch.setattr(schedules, 'jnp', None)
    monkeypatch.setattr(schedules, 'jax', None)
    answers = [schedule.is_mask_update_iter(kind(step)) for step in range(20)]
    assert {type(answer) for answer in answers} == {bool}
    assert [step for step, answer in enumerate(answers) if answer] == steps


def test_steps_of_numpy_are_those_of_python():
    schedule = schedules.PeriodicSchedule(np.int64(5), np.int32(0), jnp.int32(10))
    assert schedule == schedules.PeriodicSchedule(5, 0, 10)
    assert schedule.is_mask_update_iter(5) is True
    assert schedules.StepsSchedule(np.array([3, 7])).steps == (3, 7)
    assert schedules.OneShotSchedule(np.int8(3)).is_mask_update_iter(2) is False


@pytest.mark.parametrize(('schedule', 'steps'), DUE.values(), ids=DUE)
def test_dense_leaves_stay_dense_and_the_target_is_reached(schedule, steps):
    reached = schedule.get_sparsity_at_step({'a': 0.8, 'b': None}, jnp.int32(100))
    assert reached['b'] is None
    np.testing.assert_allclose(reached['a'], 0.8, rtol=1e-6)


def test_polynomial_grows_from_nothing_and_never_shrinks():
    schedule = schedules.PolynomialSchedule(1, 10, 50, power=2)
    values = [float(schedule.get_sparsity_at_step(0.9, step)) for step in range(60)]
    assert values[:10] == [0.0] * 10
    assert values == sorted(values)
    assert values[10] == pytest.approx(0.9 * (1 - (1 - 1 / 40) ** 2), rel=1e-5)
    assert values[49] == pytest.approx(0.9)


# Step -> sparsity by hand of a cubic from 0.5 to 0.9 over steps 0 to 9: after a share t, 0.5 + 0.4 (1 - (1 - t)³).
CUBIC = {-1: 0.5, 0: 0.6084, 4: 0.85, 8: 0.8996, 9: 0.9, 50: 0.9}


@pytest.mark.parametrize(('step', 'sparsity'), CUBIC.items())
def test_polynomial_may_begin_at_a_sparsity(step, sparsity):
    schedule = schedules.PolynomialSchedule(1, 0, 10, initial_sparsity=0.5)
    targets = {'pruned further': 0.9, 'at it': 0.5, 'below it': 0.3, 'whole': 0.0, 'dense': None}
    reached = schedule.get_sparsity_at_step(targets, jnp.int32(step))
    assert reached['pruned further'] == pytest.approx(sparsity, abs=1e-6)
    assert reached['at it'] == 0.5
    assert reached['below it'] == pytest.approx(0.3)
    assert reached['whole'] == 0
    assert reached['dense'] is None


def test_one_shot_tells_the_target_at_any_step():
    targets = {'a': 0.5, 'b': None}
    assert schedules.OneShotSchedule(5).get_sparsity_at_step(targets, jnp.int32(4)) is targets


@pytest.mark.parametrize(('schedule', 'steps'), DUE.values(), ids=DUE)
def test_nothing_is_due_at_no_step(schedule, steps):
    assert schedule.is_mask_update_iter(None) is False


@pytest.mark.parametrize(
    'number', [4e5, np.float64(4e5), np.float32(4e5), jnp.float32(4e5), jnp.int32(400000)]
)
def test_whole_valued_floats_are_steps(number):
    assert schedules.PolynomialSchedule(number, 0.0, number) == schedules.PolynomialSchedule(
        400000, 0, 400000
    )
    for schedule in (schedules.OneShotSchedule(number), schedules.StepsSchedule((number,))):
        assert schedule.is_mask_update_iter(400000) is True


BAD = [
    (lambda: schedules.PeriodicSchedule(0), ValueError, 'update_freq must be at least 1, got 0'),
    (
        lambda: schedules.PeriodicSchedule(2.5),
        TypeError,
        'update_freq must be a whole number of steps, got 2.5',
    ),
    (
        lambda: schedules.PeriodicSchedule(True),
        TypeError,
        'update_freq must be a whole number of steps, got True',
    ),
    (
        lambda: schedules.PeriodicSchedule(jnp.float32(2.5)),
        TypeError,
        'update_freq must be a whole number of steps',
    ),
    (
        lambda: schedules.PeriodicSchedule(jnp.array(True)),
        TypeError,
        'update_freq must be a whole number of steps',
    ),
    (
        lambda: schedules.PeriodicSchedule(np.array([2])),
        TypeError,
        'update_freq must be a whole number of steps',
    ),
    (
        lambda: schedules.PeriodicSchedule('2'),
        TypeError,
        "update_freq must be a whole number of steps, got '2'",
    ),
    (
        lambda: schedules.PeriodicSchedule(float('inf')),
        TypeError,
        'update_freq must be a whole number of steps',
    ),
    (lambda: schedules.PeriodicSchedule(2, 0, 1e10), ValueError, 'update_end_step must be at most'),
    (
        lambda: schedules.PeriodicSchedule(2, -1),
        ValueError,
        'update_start_step must not be negative, got -1',
    ),
    (
        lambda: schedules.PeriodicSchedule(2, 9, 3),
        ValueError,
        'update_end_step=3 lies before update_start_step=9',
    ),
    (
        lambda: schedules.PolynomialSchedule(2, 9),
        ValueError,
        'PolynomialSchedule needs update_end_step',
    ),
    (
        lambda: schedules.PolynomialSchedule(2, 0, 9, power=0),
        ValueError,
        'power must be positive and finite, got 0',
    ),
    (
        lambda: schedules.PolynomialSchedule(2, 0, 9, initial_sparsity=1.5),
        ValueError,
        r'initial_sparsity must lie in \[0, 1\] .*1\.5',
    ),
    (
        lambda: schedules.PolynomialSchedule(2, 0, 9, initial_sparsity='0.5'),
        TypeError,
        "initial_sparsity must be a number between 0 and 1, got '0.5'",
    ),
    (lambda: schedules.OneShotSchedule(-3), ValueError, 'target_step must not be negative, got -3'),
    (lambda: schedules.StepsSchedule((1, -3)), ValueError, 'a step must not be negative, got -3'),
    (
        lambda: schedules.StepsSchedule((1.5,)),
        TypeError,
        'a step must be a whole number of steps, got 1.5',
    ),
]


@pytest.mark.parametrize(('make', 'error', 'message'), BAD)
def test_bad_settings(make, error, message):
    with pytest.raises(error, match=message):
        make()
