"""The networks of the workloads in flax nnx, of any size.

Classifiers are called with images and whether they train, and return logits. The `settings` of each layer are its
`dtype`, in which it computes, and `rngs`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def convolution_as_matmul(
    images: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Any, **_: Any
) -> jax.Array:
    """Convolves as `lax.conv_general_dilated` does, by a matrix product over shifted images.

    Images are [batch, height, width, channels], the kernel is [height, width, channels, filters];
    `padding` is 'SAME', 'VALID', or the pixels before and after each axis.

    >>> kernel = jnp.ones((3, 3, 2, 5))
    >>> convolution_as_matmul(jnp.ones((1, 4, 4, 2)), kernel, (2, 2), 'SAME').shape
    (1, 2, 2, 5)
    """
    height, width = kernel.shape[:2]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(images.shape[1:3], (height, width), strides, padding)
    padded = jnp.pad(images, ((0, 0), *padding, (0, 0)))
    rows = padded.shape[1] - height + 1
    columns = padded.shape[2] - width + 1
    shifted = []
    for row in range(height):
        for column in range(width):
            of_rows = slice(row, row + rows, strides[0])
            of_columns = slice(column, column + columns, strides[1])
            shifted.append(padded[:, of_rows, of_columns])
    patches = jnp.concatenate(shifted, axis=-1)
    return patches @ kernel.reshape(-1, kernel.shape[-1])


def fastest_convolution() -> Any:
    """The convolution that is fastest to train with on this machine, as flax takes it."""
    if jax.default_backend() == 'cpu':
        return convolution_as_matmul
    return jax.lax.conv_general_dilated


class Functional:
    """A model taken apart into pure functions of its parameters and its batch statistics."""

    def __init__(self, make: Callable[[nnx.Rngs], Any]):
        """Takes a function from `nnx.Rngs` to a model; nothing is computed."""
        self._make = make
        shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        self._graph, _, _ = nnx.split(shapes, nnx.Param, nnx.BatchStat)

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """The parameters and the batch statistics, each an `nnx.State`."""
        rngs = nnx.Rngs(key)
        model = self._make(rngs)
        _, params, state = nnx.split(model, nnx.Param, nnx.BatchStat)
        return params, state

    def init_params(self, key: jax.Array) -> Any:
        """The parameters alone."""
        params, _ = self.init(key)
        return params

    def module(self, params: Any) -> Any:
        """The model with its parameters, for those that keep no batch statistics."""
        return nnx.merge(self._graph, params)

    def apply(
        self, params: Any, state: Any, images: jax.Array, train: bool
    ) -> tuple[jax.Array, Any]:
        """Logits float32[batch, classes], and the batch statistics afterwards.

        In training, batches are normalized by themselves.
        """
        # Variables of their own: those of an outer trace must not be written to.
        own_state = jax.tree.map(lambda leaf: leaf, state)
        model = nnx.merge(self._graph, params, own_state)
        logits = model(images, train)
        new_state = nnx.state(model, nnx.BatchStat)
        return logits.astype(jnp.float32), new_state


class _ConvNorm(nnx.Module):
    """A convolution without bias and a batch normalization."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, scale: str = 'ones', **settings
    ):
        init = nnx.initializers.variance_scaling(2.0, 'fan_out', 'normal')
        convolve: Any = functools.partial(nnx.Conv, conv_general_dilated=fastest_convolution())
        sizes = inputs, outputs, (size, size), stride
        self.conv = convolve(*sizes, use_bias=False, kernel_init=init, **settings)
        scale_init = getattr(nnx.initializers, scale)
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, scale_init=scale_init, **settings)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return self.norm(self.conv(images), use_running_average=not train)


class _Block(nnx.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 at 4 x width."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, **settings):
        outputs = 4 * width if bottleneck else width
        sizes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        if bottleneck:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.depth = len(sizes)
        for number, size in enumerate(sizes, 1):
            # The last scale of a block begins at zero: the block is then the identity (Goyal et al., 2017).
            scale = 'zeros' if number == self.depth else 'ones'
            setattr(self, f'layer{number}', _ConvNorm(*size, scale=scale, **settings))
        self.has_shortcut = stride != 1 or inputs != outputs
        if self.has_shortcut:
            self.shortcut = _ConvNorm(inputs, outputs, 1, stride, **settings)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        hidden = images
        for number in range(1, self.depth + 1):
            hidden = getattr(self, f'layer{number}')(hidden, train)
            if number < self.depth:
                hidden = nnx.relu(hidden)
        shortcut = self.shortcut(images, train) if self.has_shortcut else images
        return nnx.relu(hidden + shortcut)


class ResNet(nnx.Module):
    """A residual network (He et al., 2015).

    `image` is height, width and channels. `stages` has the number of blocks of each stage; each further one halves the
    image's size and doubles `width`. A large stem, for ImageNet, is a 7x7 convolution and a pooling, both of stride
    2; small images have one 3x3 convolution.
    """

    def __init__(
        self,
        image: Sequence[int],
        stages: Sequence[int],
        width: int,
        bottleneck: bool,
        large_stem: bool,
        classes: int,
        **settings: Any,
    ):
        size, stride = (7, 2) if large_stem else (3, 1)
        self.stem = _ConvNorm(image[-1], width, size, stride, **settings)
        self.large_stem = large_stem
        features, names = width, []
        for stage, blocks in enumerate(stages):
            stage_width = width << stage
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                names.append(f'stage{stage + 1}_block{number + 1}')
                block = _Block(features, stage_width, stride, bottleneck, **settings)
                setattr(self, names[-1], block)
                features = stage_width * (4 if bottleneck else 1)
        self.names = tuple(names)
        self.head = nnx.Linear(features, classes, **settings)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        hidden = nnx.relu(self.stem(images, train))
        if self.large_stem:
            hidden = nnx.max_pool(hidden, (3, 3), (2, 2), padding='SAME')
        for name in self.names:
            hidden = getattr(self, name)(hidden, train)
        return self.head(hidden.mean(axis=(1, 2)))


class _EncoderLayer(nnx.Module):
    """Attention and two dense layers, each after a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int, **settings: Any):
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-6, **settings)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **settings)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-6, **settings)
        self.dense1 = nnx.Linear(width, hidden, **settings)
        self.dense2 = nnx.Linear(hidden, width, **settings)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.dense2(nnx.gelu(self.dense1(self.norm2(tokens))))


class ViT(nnx.Module):
    """A vision transformer (Dosovitskiy et al., 2020) with a class token.

    `image` is height, width and channels, `width` that of a token, `hidden` that of the layer
    between tokens.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        patch: int,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        classes: int,
        **settings: Any,
    ):
        rows, columns, channels = image
        if rows % patch or columns % patch:
            raise ValueError(
                f'model.patch {patch} does not divide images of {rows}x{columns} pixels'
            )
        self.patch, self.layers = patch, layers
        tokens = (rows // patch) * (columns // patch) + 1
        self.embed = nnx.Linear(patch * patch * channels, width, **settings)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        positions = jax.random.normal(settings['rngs'].params(), (1, tokens, width))
        self.positions = nnx.Param(0.02 * positions)
        for number in range(1, layers + 1):
            setattr(self, f'layer{number}', _EncoderLayer(width, heads, hidden, **settings))
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, **settings)
        self.head = nnx.Linear(width, classes, **settings)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        del train
        batch, height, width, channels = images.shape
        rows, columns = height // self.patch, width // self.patch
        patches = images.reshape(batch, rows, self.patch, columns, self.patch, channels)
        tokens = self.embed(patches.swapaxes(2, 3).reshape(batch, rows * columns, -1))
        class_token = self.token[...].astype(tokens.dtype)
        first = jnp.broadcast_to(class_token, (batch, 1, tokens.shape[-1]))
        tokens = jnp.concatenate([first, tokens], axis=1)
        tokens = tokens + self.positions[...].astype(tokens.dtype)
        for number in range(1, self.layers + 1):
            tokens = getattr(self, f'layer{number}')(tokens)
        return self.head(self.norm(tokens)[:, 0])


class LeNet(nnx.Module):
    """LeNet-300-100: dense layers alone (LeCun et al., 1998).

    Weights and biases begin uniformly between -1/√inputs and 1/√inputs of their layer, as in
    PyTorch, where the results that this model is compared with were trained.
    """

    def __init__(self, image: Sequence[int], hidden: Sequence[int], classes: int, **settings: Any):
        sizes = [math.prod(image), *hidden, classes]
        self.depth = len(hidden) + 1
        for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
            bound = inputs**-0.5
            init: Any = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
            layer = functools.partial(nnx.Linear, kernel_init=init, bias_init=init)
            setattr(self, f'dense{number}', layer(inputs, outputs, **settings))

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        del train
        hidden = images.reshape(len(images), -1)
        for number in range(1, self.depth):
            hidden = nnx.relu(getattr(self, f'dense{number}')(hidden))
        return getattr(self, f'dense{self.depth}')(hidden)


class ConvNet(nnx.Module):
    """Convolutions and two dense layers: logits of images, or the values of actions by what a player sees.

    `shape` is height, width and channels; each convolution has its filters, its size and its stride. Behind them sides
    of `pool` pixels become one; the rates in `dropout` hold before each dense layer.
    """

    def __init__(
        self,
        shape: Sequence[int],
        filters: Sequence[int],
        kernel_sizes: Sequence[int],
        strides: Sequence[int],
        hidden: int,
        outputs: int,
        pool: int = 1,
        dropout: Sequence[float] = (0.0, 0.0),
        **settings: Any,
    ):
        self.dtype = settings.setdefault('dtype', jnp.float32)
        self.layers, self.pool = len(filters), pool
        self.drop1, self.drop2 = map(nnx.Dropout, dropout)
        height, width, channels = shape
        # With strides XLA's own convolution is the faster, on a CPU, too.
        fastest = jax.lax.conv_general_dilated if max(strides) > 1 else fastest_convolution()
        convolve = functools.partial(nnx.Conv, padding='VALID', conv_general_dilated=fastest)
        convolutions = zip(filters, kernel_sizes, strides, strict=True)
        for number, (features, size, stride) in enumerate(convolutions, 1):
            layer = convolve(channels, features, (size, size), stride, **settings)
            setattr(self, f'conv{number}', layer)
            height, width = ((side - size) // stride + 1 for side in (height, width))
            channels = features
        inputs = (height // pool) * (width // pool) * channels
        self.dense = nnx.Linear(inputs, hidden, **settings)
        self.head = nnx.Linear(hidden, outputs, **settings)

    def __call__(self, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Float32[batch, outputs]; uint8 images are brightness, over 255. Without a key there is no dropout."""
        features = images.astype(self.dtype)
        if images.dtype == jnp.uint8:
            features = features / 255
        for number in range(1, self.layers + 1):
            features = nnx.relu(getattr(self, f'conv{number}')(features))
        if self.pool > 1:
            sides = self.pool, self.pool
            features = nnx.max_pool(features, sides, sides)
        features = features.reshape(len(features), -1)
        settings: Any = {'deterministic': key is None}
        if key is not None:
            settings['rngs'] = nnx.Rngs(key)
        features = nnx.relu(self.dense(self.drop1(features, **settings)))
        return self.head(self.drop2(features, **settings)).astype(jnp.float32)
