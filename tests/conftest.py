"""Settings for all tests."""

import hypothesis
import pytest

from helpers import random_numbers

# Compilation makes first calls slow, and a run must not depend on chance.
hypothesis.settings.register_profile('jaxpruner', deadline=None, derandomize=True)
hypothesis.settings.load_profile('jaxpruner')


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A test draws the same numbers in every run, whichever tests come before it; so do its fixtures."""
    random_numbers.restart_generators()
