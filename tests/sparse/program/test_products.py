"""Operators in the place of leaves: models of all frameworks, programs of every form, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers.random_numbers import Normal
from jaxpruner.sparse.products import Products
from jaxpruner.uses import param_uses
from structure.values import values_like
from uses import models
from uses.table import scan, short_uses


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    """An operator that multiplies by the whole matrix `[*layers, inputs, outputs]`."""

    matrix: jax.Array

    def multiply(self, rows, result_dtype):
        return rows.astype(result_dtype) @ self.matrix


def dense_weights(products, params):
    """The parameters with `Dense` in the place of each leaf that is a matrix."""
    operators = {}
    for name, leaf in products.leaves(params).items():
        operators[name] = Dense(products.by_leaf[name].to_matrix(leaf))
    return products.put(params, operators)


def assert_equal_trees(first, second, rtol=1e-4):
    def check(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)

    jax.tree.map(check, first, second)


@pytest.mark.parametrize('model', models.MODELS.values(), ids=models.MODELS)
def test_models_of_frameworks(model):
    apply_fn, params, inputs = model.make()
    params, inputs = values_like(params, inputs)
    products = Products(apply_fn, params, *inputs)
    for name, text in short_uses(param_uses(apply_fn, params, *inputs)).items():
        is_matrix = text.startswith(('dot', 'conv')) and '~' not in text and ',' not in text
        if not is_matrix or 'has groups' in products.refused.get(name, ''):
            assert name in products.refused
        else:
            assert name in products.by_leaf
    found = jax.jit(products.apply)(dense_weights(products, params), *inputs)
    assert_equal_trees(found, jax.jit(apply_fn)(params, *inputs))
    for name, leaf in products.leaves(params).items():
        matrix_leaf = products.by_leaf[name]
        assert (matrix_leaf.from_matrix(matrix_leaf.to_matrix(leaf)) == leaf).all(), name


def branches(p, x):
    return lax.cond(x.sum() > 0, lambda x: x @ p['w'], lambda x: 2 * x @ p['w'], x)


def counted(p, x):
    """Takes its layers by the number of the trip."""
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p['stack'][i]), x)


def rematerialised(p, x):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return scan(layer, x, p['stack'], unroll=3, reverse=True)


def layers_in_groups(p, x):
    groups = p['groups'].transpose(2, 0, 1, 3)  # the axis of the inner loop last but one
    return scan(lambda x, ws: scan(lambda x, w: jnp.tanh(x @ w), x, ws), x, groups)


def experts_of_their_own(p, x):
    data = x * jnp.arange(1.0, 4)[:, None, None]
    return jnp.einsum('ebi,eio->ebo', data, p['stack'])


def weights_on_the_left(p, x):
    return p['w'].T @ x.T


def several_axes(p, x):
    """Inputs and outputs along two axes each, moved and cast."""
    kernel = p['heads'].astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.einsum('bij,jhid->bhd', x.reshape(-1, 2, 2), kernel)


def while_loop(p, x):
    def body(state):
        count, x = state
        return count + 1, jnp.tanh(x @ p['w'])

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


normal = Normal(0)
SHAPES = {'w': (4, 4), 'stack': (3, 4, 4), 'groups': (3, 4, 2, 4), 'heads': (2, 3, 2, 5)}
PROGRAMS = [
    (branches, 'w', ()),
    (counted, 'stack', (3,)),
    (rematerialised, 'stack', (3,)),
    (layers_in_groups, 'groups', (2, 3)),
    (experts_of_their_own, 'stack', (3,)),
    (weights_on_the_left, 'w', ()),
    (several_axes, 'heads', ()),
    (while_loop, 'w', ()),
]


@pytest.mark.parametrize(('apply_fn', 'name', 'layers'), PROGRAMS)
def test_programs_of_every_form(apply_fn, name, layers):
    params, x = {name: normal(*SHAPES[name])}, normal(5, 4)
    products = Products(apply_fn, params, x)
    assert products.by_leaf[name].layers == layers
    assert products.by_leaf[name].to_matrix(params[name]).shape[:-2] == layers
    operators = dense_weights(products, params)
    assert_equal_trees(products.apply(operators, x), apply_fn(params, x), rtol=1e-5)
    if apply_fn is while_loop:
        return

    def loss(apply_fn):
        return lambda params, x: jnp.square(apply_fn(params, x)).sum()

    (expected, *of_x), (found, *also_of_x) = (
        jax.jit(jax.grad(loss(function), (0, 1)))(tree, x)
        for function, tree in ((apply_fn, params), (products.apply, operators))
    )
    matrix_leaf = products.by_leaf[name]
    assert_equal_trees(also_of_x, of_x, rtol=1e-4)
    assert_equal_trees(found[name].matrix, matrix_leaf.to_matrix(expected[name]), rtol=1e-4)


CONVOLUTIONS = {
    'pointwise': ((1, 1, 3, 4), {'window_strides': (2, 1)}),
    'padded': ((1, 1, 3, 4), {'window_strides': (1, 1), 'padding': ((1, 0), (0, 2))}),
    'strided': ((3, 2, 3, 4), {'window_strides': (2, 3)}),
    'dilated': ((3, 2, 3, 4), {'window_strides': (1, 2), 'rhs_dilation': (1, 2)}),
    'transposed': ((3, 3, 3, 4), {'window_strides': (1, 1), 'lhs_dilation': (2, 3)}),
    'cropped': ((2, 2, 3, 4), {'window_strides': (1, 1), 'padding': ((-1, 0), (0, -2))}),
}
LAYOUTS = [
    (('NHWC', 'HWIO', 'NHWC'), (0, 1, 2, 3), (0, 1, 2, 3)),
    (('NCHW', 'OIHW', 'NHWC'), (0, 3, 1, 2), (3, 2, 0, 1)),
]


class Convolved(Dense):
    """An operator with a way of its own to convolve."""

    def convolve(self, image, convolution):
        channels = image.shape[-1]
        kernel = self.matrix.reshape(*convolution.window, channels, -1)
        return convolution.run(image[..., :2], kernel[..., :2, :]) + convolution.run(
            image[..., 2:], kernel[..., 2:, :]
        )


jax.tree_util.register_dataclass(Convolved, ['matrix'], [])


@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_convolutions(name):
    kernel, settings = CONVOLUTIONS[name]
    names, image_order, kernel_order = LAYOUTS[len(name) % 2]
    settings = {'padding': ((0, 0), (0, 0)), **settings, 'dimension_numbers': names}

    def apply_fn(p, x):
        return lax.conv_general_dilated(x, p['w'], **settings)

    params = {'w': normal(*kernel).transpose(kernel_order)}
    image = normal(2, 7, 8, 3).transpose(image_order)
    products = Products(apply_fn, params, image)
    matrix_leaf = products.by_leaf['w']
    expected = apply_fn(params, image)
    assert matrix_leaf.op == 'conv'
    assert (matrix_leaf.inputs, matrix_leaf.outputs) == (np.prod(kernel[:3]), kernel[3])
    for operator in (Dense, Convolved):
        matrix = matrix_leaf.to_matrix(params['w'])
        weights = products.put(params, {'w': operator(matrix)})
        assert_equal_trees(products.apply(weights, image), expected)


@jax.custom_vjp
def own_rule(w, x):
    return x @ w


own_rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
MASK = np.eye(4) > 0
ROWS = jnp.array([1, 3])
REFUSED = {
    'no contraction': lambda p, x: x + p['w'],
    'is computed from this leaf': lambda p, x: jnp.tanh(x @ jnp.abs(p['w'])),
    'data look up its rows': lambda p, x: p['w'][x[:, 0].astype(int)] @ p['w'].T,
    'derivative rule': lambda p, x: own_rule(p['w'], x),
    'more than one place': lambda p, x: x @ p['w'] + x @ p['w'].T,
    'other parameters': lambda p, x: x @ jnp.concatenate([p['w'], p['v']], 1),
    'only a part': lambda p, x: x @ p['w'][:, :2],
    'parts of the shapes': lambda p, x: (x @ p['w'][:, :1]).sum() + x @ p['w'][:, 1:],
    'element by element': lambda p, x: x @ p['w'] + p['w'],
    'groups of rows': lambda p, x: lax.ragged_dot(x, p['w'].reshape(2, 4, 2), ROWS),
    'no rule for cholesky': lambda p, x: x @ jnp.linalg.cholesky(p['w']),
    'masks it with a constant': lambda p, x: x @ (p['w'] * MASK),
}


@pytest.mark.parametrize('reason', REFUSED)
def test_a_leaf_that_is_no_matrix_is_refused_with_the_reason(reason):
    params = {'w': jnp.ones((4, 4)), 'v': jnp.ones((4, 4))}
    products = Products(REFUSED[reason], params, jnp.ones((4, 4)))
    assert reason in products.refused['w']
    assert 'w' not in products.by_leaf


def test_models_that_close_over_values_of_a_transformation_are_traced_each_time():
    scale, params, x = jnp.float32(1), {'w': jnp.ones((3, 5))}, jnp.ones((4, 3))
    products = Products(lambda p, x: scale * (x @ p['w']), params, jnp.ones((2, 3)))
    weights = dense_weights(products, params)

    def scaled(factor):
        nonlocal scale
        scale = factor
        return products.apply(weights, x)

    for factor in (2.0, 3.0):
        assert_equal_trees(jax.jit(scaled)(factor), factor * (x @ params['w']))
