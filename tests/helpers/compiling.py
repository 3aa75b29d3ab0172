"""What users' programs are, where a test is about that: conftest.py settles that programs in tests compile quickly."""

import os

import jax

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


class Programs:
    """How many programs JAX compiles inside of a `with`, those among them that its cache on disk has.

    >>> with Programs() as programs:
    ...     _ = jax.jit(lambda x: x + 1)(1)
    >>> programs.number
    1
    """

    _EVENT = '/jax/core/compile/backend_compile_duration'
    _total = 0

    def __enter__(self):
        self._before = Programs._total
        return self

    def __exit__(self, *_):
        self.number = Programs._total - self._before

    @classmethod
    def count(cls, event, duration, **_):
        cls._total += event == cls._EVENT


jax.monitoring.register_event_duration_secs_listener(Programs.count)
