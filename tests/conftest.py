"""Settings for all tests."""

import hypothesis

# Compilation makes first calls slow, and a run must not depend on chance.
hypothesis.settings.register_profile('jaxpruner', deadline=None, derandomize=True)
hypothesis.settings.load_profile('jaxpruner')
