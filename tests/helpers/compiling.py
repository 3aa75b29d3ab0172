"""What users' programs are, where a test is about that: conftest.py settles that programs in tests compile quickly."""

import os

_OF_USERS = {'xla_backend_optimization_level': 3, 'xla_cpu_use_fusion_emitters': True}

# Options for `jax.jit` that undo what conftest.py did: nothing where whoever runs the tests has set flags.
AS_USERS = {
    name: value
    for name, value in _OF_USERS.items()
    if f'--{name}=' in os.environ.get('XLA_FLAGS', '')
}


def as_written(lowered):
    """Compiles a program that a test reads, or whose memory it asks for: users' operations, not optimized by LLVM."""
    return lowered.compile(compiler_options=AS_USERS | {'xla_backend_optimization_level': 0})


def environment_of_users():
    """For processes that train long enough to be worth optimizing."""
    return {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
