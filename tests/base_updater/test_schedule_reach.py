"""When a schedule updates masks, and how near its target: the same as asking it at each step."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxpruner import sparsity_schedules
from jaxpruner.base_updater import schedule_reach

STEPS = st.integers(0, 40)


@st.composite
def schedules(draw):
    kind = draw(st.sampled_from(['none', 'once', 'list', 'periodic', 'endless', 'polynomial']))
    freq, start, more = draw(st.integers(1, 15)), draw(STEPS), draw(STEPS)
    return {
        'none': lambda: sparsity_schedules.NoUpdateSchedule(),
        'once': lambda: sparsity_schedules.OneShotSchedule(start),
        'list': lambda: sparsity_schedules.StepsSchedule((more, start)),
        'periodic': lambda: sparsity_schedules.PeriodicSchedule(freq, start, start + more),
        'endless': lambda: sparsity_schedules.PeriodicSchedule(freq, start),
        'polynomial': lambda: sparsity_schedules.PolynomialSchedule(
            freq, start, start + more, power=2
        ),
    }[kind]()


@hypothesis.given(schedules())
@hypothesis.settings(deadline=None)
def test_update_steps_are_those_at_which_the_schedule_says_so(schedule):
    asked = [step for step in range(90) if schedule.is_mask_update_iter(step)]
    told = schedule_reach.update_steps(schedule)
    assert sorted({step for step in told[:100] if step < 90}) == asked


SHARES = st.floats(0, 1)


@hypothesis.given(st.integers(1, 15), STEPS, STEPS, STEPS, st.floats(0.5, 4), SHARES, SHARES)
@hypothesis.settings(deadline=None, max_examples=30)
def test_the_sparsity_is_what_the_schedule_computes(
    freq, start, more, step, power, initial, target
):
    schedule = sparsity_schedules.PolynomialSchedule(freq, start, start + more, power, initial)
    expected = float(schedule.get_sparsity_at_step(target, step))
    assert schedule_reach.sparsity_at(schedule, target, step) == pytest.approx(expected, abs=1e-5)


class Own:
    def is_mask_update_iter(self, step):
        raise AssertionError('asked')

    def get_sparsity_at_step(self, target_sparsities, step):
        raise AssertionError('asked')


class NeverOnSundays(sparsity_schedules.PeriodicSchedule):
    def is_mask_update_iter(self, step):
        return super().is_mask_update_iter(step) & (step % 7 != 0)


class Renamed(sparsity_schedules.PeriodicSchedule):
    pass


def test_of_a_schedule_of_ones_own_nothing_is_said():
    for schedule in (Own(), NeverOnSundays(10), sparsity_schedules.HostSchedule()):
        assert schedule_reach.update_steps(schedule) is None
        assert schedule_reach.sparsity_at(schedule, 0.5, 10) is None
    assert schedule_reach.update_steps(Renamed(10, 5, 40)) == range(10, 41, 10)
