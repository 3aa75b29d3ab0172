"""What users' programs are, where a test is about that: conftest.py settles that programs in tests compile quickly."""

import contextlib
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


# A setting that is part of the key of each traced program, and means nothing where no matrices are multiplied.
_PRECISIONS = {
    'cpu': None,
    'gpu': 'bfloat16',
    'several devices': 'tensorfloat32',
    'small counters': 'float32',
}


@contextlib.contextmanager
def traced_as(machine):
    """Inside, programs that were traced for other machines are not used, and those made here are used here alone.

    `jax.clear_caches` would have tests that follow compile everything anew.
    """
    with jax.default_matmul_precision(_PRECISIONS[machine]):
        yield


def environment_of_users():
    """For processes that train long enough to be worth optimizing."""
    return {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}


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
