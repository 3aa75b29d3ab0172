"""What a tap has to know of JAX's tracing and caching, which differ between versions."""

import contextlib
import functools
import itertools
from collections.abc import Hashable
from typing import Any

import jax
import jax.core
import jax.extend.core
from jax.experimental import xla_metadata

_own_context: Any = jax.make_user_context(()) if hasattr(jax, 'make_user_context') else None
_numbers = itertools.count()


def compiled_under(tokens: tuple[Hashable, ...]) -> contextlib.AbstractContextManager[Any]:
    """A context in which functions are traced and compiled apart from the same functions outside it.

    What was compiled under equal tokens is used again. Single operations that run outside jit are compiled anew, too.
    """
    if _own_context is not None:
        return _own_context(tokens)
    # Older JAX tells compiled functions apart by metadata of their operations, which change nothing else.
    return xla_metadata.set_xla_metadata(jaxpruner_taps=_number_of(tokens))


def trace_state() -> Any:
    """A value that equals another one if both were taken in the same trace."""
    module: Any = jax.extend.core
    if not hasattr(module, 'get_opaque_trace_state'):  # before it moved there
        module = jax.core
    return module.get_opaque_trace_state(convention='jaxpruner')


@functools.lru_cache(1024)  # a forgotten number costs a compilation
def _number_of(tokens: tuple[Hashable, ...]) -> str:
    del tokens
    return str(next(_numbers))
