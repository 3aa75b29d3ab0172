"""A residual network on random images, whose norms have their statistics among the parameters, as in fine-tuning."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.models import Batch, Params, mean_cross_entropy

_LAYOUT = ('NHWC', 'HWIO', 'NHWC')
_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Resnet:
    """Stages of blocks of two convolutions; each stage but the first halves the image.

    It has `2 * blocks * len(widths) + 2` layers, beside those of the shortcuts.
    """

    widths: tuple[int, ...]
    blocks: int
    image: int
    batch_size: int

    def init(self) -> Params:
        """Random parameters."""
        keys = _keys()
        params = {'stem': _layer(next(keys), 3, 3, self.widths[0])}
        inputs = self.widths[0]
        for stage, width in enumerate(self.widths):
            for number in range(self.blocks):
                block = {
                    'first': _layer(next(keys), 3, inputs, width),
                    'second': _layer(next(keys), 3, width, width),
                }
                if inputs != width:
                    block['shortcut'] = _layer(next(keys), 1, inputs, width)
                params[f'stage_{stage}_block_{number:02}'] = block
                inputs = width
        scale = jnp.sqrt(1.0 / inputs)
        params['head'] = scale * jax.random.normal(next(keys), (inputs, _CLASSES))
        return params

    def batch(self) -> Batch:
        """Random images and labels."""
        shape = self.batch_size, self.image, self.image, 3
        images = jax.random.normal(jax.random.key(0), shape)
        labels = jax.random.randint(jax.random.key(1), (self.batch_size,), 0, _CLASSES)
        return Batch(images, labels)

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """The mean cross entropy."""
        return mean_cross_entropy(self.logits(params, batch.inputs), batch.labels)

    def logits(self, params: Params, images: jax.Array) -> jax.Array:
        """What the model makes of images, `[batch, classes]`."""
        x = jax.nn.relu(_through(params['stem'], images))
        for stage in range(len(self.widths)):
            for number in range(self.blocks):
                block = params[f'stage_{stage}_block_{number:02}']
                x = _through_block(block, x, stride=1 + (stage > 0 and number == 0))
        return x.mean((1, 2)) @ params['head']


def _keys() -> Iterator[jax.Array]:
    key = jax.random.key(0)
    while True:
        key, new = jax.random.split(key)
        yield new


def _layer(key: jax.Array, window: int, inputs: int, outputs: int) -> Params:
    scale = jnp.sqrt(2.0 / (window * window * inputs))
    return {
        'kernel': scale * jax.random.normal(key, (window, window, inputs, outputs)),
        'scale': jnp.ones(outputs),
        'bias': jnp.zeros(outputs),
        'mean': jnp.zeros(outputs),
        'variance': jnp.ones(outputs),
    }


def _through_block(block: Params, x: jax.Array, stride: int) -> jax.Array:
    shortcut = _through(block['shortcut'], x, stride) if 'shortcut' in block else x
    x = jax.nn.relu(_through(block['first'], x, stride))
    return jax.nn.relu(shortcut + _through(block['second'], x))


def _through(layer: Params, x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution and a norm with fixed statistics."""
    strides = (stride, stride)
    x = jax.lax.conv_general_dilated(x, layer['kernel'], strides, 'SAME', dimension_numbers=_LAYOUT)
    mean, variance = jax.lax.stop_gradient((layer['mean'], layer['variance']))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer['scale'] + layer['bias']
