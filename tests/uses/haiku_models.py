"""Models of Haiku for the table of uses."""

import haiku as hk
import jax

from uses.table import BIAS, KEY, Model, floats, stacked


def _model(function, *inputs, state=False):
    def make():
        if state:
            network = hk.without_apply_rng(hk.transform_with_state(function))
            # Running means begin in a step of training.
            params, states = jax.eval_shape(
                lambda *x: network.init(KEY, *x, is_training=True), *inputs
            )
            return (lambda both, *x: network.apply(*both, *x)[0]), (params, states), inputs
        network = hk.without_apply_rng(hk.transform(function))
        return network.apply, jax.eval_shape(network.init, KEY, *inputs), inputs

    return make


def _resnet(x, is_training=False):
    x = hk.Conv2D(4, 3)(x)
    norm = hk.BatchNorm(True, True, 0.9)
    x = x + hk.Conv2D(4, 3, with_bias=False)(jax.nn.relu(norm(x, is_training=is_training)))
    return hk.Linear(5)(hk.Flatten()(hk.avg_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), 'SAME')))


def _norm():
    return hk.LayerNorm(-1, True, True)


def _block(x):
    start = hk.initializers.VarianceScaling(1.0)
    h = _norm()(x)
    x = x + hk.MultiHeadAttention(2, 4, w_init=start)(h, h, h)
    return x + hk.Linear(8)(jax.nn.gelu(hk.Linear(16)(_norm()(x))))


def _scanned(x):
    return hk.experimental.layer_stack(3)(hk.remat(_block))(x)


def _convolutions(x):
    x = hk.Conv2D(8, 3, feature_group_count=2, with_bias=False, name='grouped')(x)
    x = hk.DepthwiseConv2D(1, 3, with_bias=False, name='depthwise')(x)
    return hk.Conv2DTranspose(4, 3, stride=2, with_bias=False, name='transposed')(x)


REST = {'*/w': 'dot 0>1', '*/b': BIAS, '*/scale': BIAS, '*/offset': BIAS}

MODELS = {
    'resnet': Model(
        _model(_resnet, floats(2, 8, 8, 3), state=True),
        {
            '*conv*/w': 'conv 012>3',
            '*linear/w': 'dot 0>1',
            '*mean_ema/average': 'elementwise >0123',
            '*var_ema/average': '~elementwise >0123',
            '*batch_norm/scale': '~elementwise >0123',
            '*batch_norm/offset': 'elementwise >0123',
            '*/b': BIAS,
        },
        unused=('*_ema/counter', '*_ema/hidden'),
    ),
    'scanned': Model(_model(_scanned, floats(2, 6, 8)), stacked(REST)),
    'convolutions': Model(
        _model(_convolutions, floats(2, 8, 8, 4)),
        {'transposed/w': 'conv 013>2', '*': 'conv 012>3'},
        flops=2 * 2 * 64 * (9 * 2 * 8 + 9 * 8 + 9 * 8 * 4),
    ),
}
