"""Layers of like shape share their programs, and what they compute is their own."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.trace.compiled_once import CompiledOnce


def test_functions_of_one_program_compute_what_is_theirs():
    doubles = [CompiledOnce(lambda x, factor=2: factor * x['a']) for _ in range(3)]
    assert [float(double({'a': jnp.float32(i)})) for i, double in enumerate(doubles)] == [0, 2, 4]
    # An argument that is not used is not mistaken for another one.
    arguments = [jnp.float32(number) for number in (1, 10, 100)]
    assert float(CompiledOnce(lambda a, b, c: a + c)(*arguments)) == 101
    assert float(CompiledOnce(lambda a, b, c: a + b)(*arguments)) == 11


def test_what_calls_python_is_compiled_anew():
    def scaled(factor):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return CompiledOnce(lambda x: jax.pure_callback(lambda x: np.asarray(x) * factor, shape, x))

    assert [float(scaled(np.float32(factor))(jnp.float32(1))) for factor in (2, 3)] == [2, 3]
