"""What tests of sweeps share."""

import jax
import pytest


@pytest.fixture(scope='module')
def compiled_once(tmp_path_factory):
    """Every restart compiles the same programs."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update('jax_compilation_cache_dir', str(tmp_path_factory.mktemp('compiled')))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    compilation_cache.reset_cache()
    yield
    jax.config.update('jax_compilation_cache_dir', before[0])
    jax.config.update('jax_persistent_cache_min_compile_time_secs', before[1])
    compilation_cache.reset_cache()
