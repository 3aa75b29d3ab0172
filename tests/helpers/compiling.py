"""What users' programs are, where a test is about that: conftest.py settles that programs in tests compile quickly."""

import os

import jax

_LEVEL = 'xla_backend_optimization_level'

# Options for `jax.jit` that undo what conftest.py did: nothing where whoever runs the tests has set flags.
AS_USERS = {_LEVEL: 3} if f'--{_LEVEL}=0' in os.environ.get('XLA_FLAGS', '') else {}


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
