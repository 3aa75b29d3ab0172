"""Whatever the kernels, their product and its derivatives are those of the product without kernels."""

import jax
import jax.numpy as jnp
import pytest

from sparse.operators.block_kernels.cases import (
    Case,
    PlainKernels,
    assert_close,
    case,
    in_kernels,
    without_kernels,
)

SHAPES = {
    'whole blocks, whole tiles': (8, 6, 4, (2, 2), 2),
    'padded in all directions': (5, 10, 7, (2, 3), 3),
    'one block': (1, 1, 1, (1, 1), 1),
}
MAPPED = [
    ('rows', 'cotangent'),
    ('values',),
    ('indices',),
    ('values', 'indices', 'probe'),
    Case._fields,
]

plain = jax.jit(without_kernels)
plain_batch = jax.jit(jax.vmap(without_kernels))


@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_products_and_derivatives_are_those_without_kernels(shape):
    given = case(*shape)
    found = jax.jit(in_kernels(PlainKernels()))(given)
    for one, expected in zip(found, plain(given), strict=True):
        assert_close(one, expected)


def test_no_rows():
    given = case(0, 4, 3, (2, 2), 1)._replace(probe=None)
    result, of_rows, of_values, _ = jax.jit(in_kernels(PlainKernels()))(given)
    assert result.shape == (0, 3)
    assert of_rows.shape == (0, 4)
    assert not of_values.any()
    members = stacked(given, given)
    result, of_rows, of_values, _ = jax.jit(jax.vmap(in_kernels(PlainKernels())))(members)
    assert result.shape == (2, 0, 3)
    assert of_rows.shape == (2, 0, 4)
    assert not of_values.any()


@pytest.mark.parametrize('mapped', MAPPED, ids=' and '.join)
def test_members_of_a_batch_are_one_call_of_each_kernel(mapped):
    members = stacked(member(0), member(10))
    axes = Case._make(0 if name in mapped else None for name in Case._fields)
    given = Case._make(x if axis == 0 else x[0] for x, axis in zip(members, axes, strict=True))
    batch = jax.vmap(in_kernels(PlainKernels()), in_axes=(axes,))
    assert PlainKernels.calls_in(jax.make_jaxpr(batch)(given)) == 3
    of_all = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), given, members)
    for one, expected in zip(jax.jit(batch)(given), plain_batch(of_all), strict=True):
        assert_close(one, expected)


def test_a_batch_of_batches_is_one_call_of_each_kernel():
    members = stacked(member(0), member(10), member(20), member(30))
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), members)
    batch = jax.vmap(jax.vmap(in_kernels(PlainKernels())))
    assert PlainKernels.calls_in(jax.make_jaxpr(batch)(pairs)) == 3
    for one, expected in zip(jax.jit(batch)(pairs), plain_batch(members), strict=True):
        assert_close(one.reshape(expected.shape), expected)


def member(seed):
    return case(5, 10, 7, (2, 3), 2, seed=seed)


def stacked(*cases):
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *cases)
