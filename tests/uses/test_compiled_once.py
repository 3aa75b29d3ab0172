"""Layers of like shape share their programs, and what they compute is their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.uses import compiled_once
from jaxpruner.uses.compiled_once import CompiledOnce


@pytest.fixture
def compiled(monkeypatch):
    """The executables that are made from here on."""
    found = type(compiled_once._executables)()
    monkeypatch.setattr(compiled_once, '_executables', found)
    return found


def test_functions_of_one_program_share_it(compiled):
    doubles = [CompiledOnce(lambda x, factor=2: factor * x['a']) for _ in range(3)]
    triple = CompiledOnce(lambda x: 3 * x['a'])
    assert [float(double({'a': jnp.float32(i)})) for i, double in enumerate(doubles)] == [0, 2, 4]
    assert len(compiled) == 1
    assert float(triple({'a': jnp.float32(2)})) == 6
    assert len(compiled) == 2


def test_arguments_that_are_not_used_are_not_mistaken_for_each_other(compiled):
    first = CompiledOnce(lambda a, b, c: a + c)
    second = CompiledOnce(lambda a, b, c: a + b)
    arguments = [jnp.float32(number) for number in (1, 10, 100)]
    assert (float(first(*arguments)), float(second(*arguments))) == (101, 11)


def test_shapes_structures_and_donated_arguments(compiled):
    add = CompiledOnce(lambda total, x: [total[0] + x.sum()], donate_argnums=(0,))
    total = [jnp.zeros(())]
    for length in (2, 3, 2):
        old, total = total, add(total, jnp.ones(length))
        assert old[0].is_deleted()
    assert float(total[0]) == 7
    assert len(compiled) == 2


def test_old_programs_are_let_go(compiled, monkeypatch):
    monkeypatch.setattr(compiled_once, '_MOST_KEPT', 2)
    for factor in range(4):
        assert CompiledOnce(lambda x, factor=factor: factor * x)(jnp.float32(2)) == 2 * factor
    assert len(compiled) == 2


def test_functions_that_call_python_back_share_nothing(compiled):
    def scaled(factor):
        def call(x):
            return jax.pure_callback(
                lambda x: np.asarray(x) * factor, jax.ShapeDtypeStruct((), jnp.float32), x
            )

        return CompiledOnce(call)

    assert [float(scaled(np.float32(factor))(jnp.float32(1))) for factor in (2, 3)] == [2, 3]
    assert not compiled


@pytest.mark.parametrize('wrap', [lambda function: function, jax.jit])
def test_programs_that_hold_large_arrays_are_not_kept(compiled, wrap):
    frozen = jnp.arange(300_000.0)
    read = CompiledOnce(wrap(lambda i: frozen[i]))
    assert float(read(jnp.int32(299_999))) == 299_999
    assert not compiled


@pytest.mark.parametrize('layers', [3, 6])
def test_sequential_pruning_compiles_like_layers_once(compiled, layers):
    shapes = {'up': (8, 16), 'down': (16, 8)}
    keys = iter(jax.random.split(jax.random.key(0), 12))
    params = {
        f'{i}': {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        for i in range(layers)
    }
    x = jax.random.normal(jax.random.key(1), (64, 8))

    def apply(params, x):
        for layer in params.values():
            x = x + jnp.tanh(x @ layer['up']) @ layer['down']
        return x

    found, _ = jaxpruner.prune(params, 0.5, 'wanda', apply_fn=apply, batches=[x], sequential=True)
    assert (
        len(compiled) <= 6
    )  # whatever the number of layers: from one to the next, and the statistics of each product
    again, _ = jaxpruner.prune(
        params, 0.5, 'wanda', apply_fn=apply, batches=[x], sequential=True, blocks=None
    )
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert len(compiled) <= 6
