"""Layers of like shape share their programs, and what they compute is their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.trace import compiled_once
from jaxpruner.trace.compiled_once import CompiledOnce


@pytest.fixture
def compiled(monkeypatch):
    """The executables that are made from here on."""
    found = type(compiled_once._executables)()
    monkeypatch.setattr(compiled_once, '_executables', found)
    return found


def test_functions_of_one_program_share_it(compiled):
    doubles = [CompiledOnce(lambda x, factor=2: factor * x['a']) for _ in range(3)]
    assert [float(double({'a': jnp.float32(i)})) for i, double in enumerate(doubles)] == [0, 2, 4]
    assert len(compiled) == 1
    # An argument that is not used is not mistaken for another one.
    arguments = [jnp.float32(number) for number in (1, 10, 100)]
    assert float(CompiledOnce(lambda a, b, c: a + c)(*arguments)) == 101
    assert float(CompiledOnce(lambda a, b, c: a + b)(*arguments)) == 11
    assert len(compiled) == 3


def test_what_calls_python_or_holds_large_arrays_is_not_kept(compiled):
    def scaled(factor):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return CompiledOnce(lambda x: jax.pure_callback(lambda x: np.asarray(x) * factor, shape, x))

    assert [float(scaled(np.float32(factor))(jnp.float32(1))) for factor in (2, 3)] == [2, 3]
    frozen = jnp.arange(300_000.0)
    for wrap in (lambda function: function, jax.jit):
        read = CompiledOnce(wrap(lambda i: frozen[i]))
        assert float(read(jnp.int32(299_999))) == 299_999
    assert not compiled
