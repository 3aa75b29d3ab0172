"""The networks of the workloads in flax nnx, of any size.

Classifiers are called with images and whether they train, and return logits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


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
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int,
        *,
        is_last: bool = False,
        **settings,
    ):
        kernel_init = nnx.initializers.variance_scaling(2.0, 'fan_out', 'normal')
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides=stride,
            use_bias=False,
            kernel_init=kernel_init,
            conv_general_dilated=fastest_convolution(),
            **settings,
        )
        # The last scale of a block begins at zero: the block is then the identity (Goyal et al.,
        # 2017).
        init = nnx.initializers.zeros if is_last else nnx.initializers.ones
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, scale_init=init, **settings)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        convolved = self.conv(images)
        return self.norm(convolved, use_running_average=not train)


class _Block(nnx.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 at 4 x width."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, **settings):
        outputs = 4 * width if bottleneck else width
        layer = functools.partial(_ConvNorm, **settings)
        if bottleneck:
            self.layer1 = layer(inputs, width, 1, 1)
            self.layer2 = layer(width, width, 3, stride)
            self.layer3 = layer(width, outputs, 1, 1, is_last=True)
        else:
            self.layer1 = layer(inputs, width, 3, stride)
            self.layer2 = layer(width, outputs, 3, 1, is_last=True)
        self.depth = 3 if bottleneck else 2
        self.has_shortcut = stride != 1 or inputs != outputs
        if self.has_shortcut:
            self.shortcut = layer(inputs, outputs, 1, stride)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        hidden = images
        for number in range(1, self.depth + 1):
            layer = getattr(self, f'layer{number}')
            hidden = layer(hidden, train)
            if number < self.depth:
                hidden = nnx.relu(hidden)
        shortcut = images
        if self.has_shortcut:
            shortcut = self.shortcut(images, train)
        return nnx.relu(hidden + shortcut)


class ResNet(nnx.Module):
    """A residual network (He et al., 2015).

    `stages` has the number of blocks of each stage; each further one halves the image's size and
    doubles `width`. A large stem, for ImageNet, is a 7x7 convolution and a pooling, both of stride
    2; small images have one 3x3 convolution.
    """

    def __init__(
        self,
        channels: int,
        stages: Sequence[int],
        width: int,
        bottleneck: bool,
        large_stem: bool,
        classes: int,
        dtype: Any,
        *,
        rngs: nnx.Rngs,
    ):
        settings: Any = {'dtype': dtype, 'rngs': rngs}
        size, stride = (7, 2) if large_stem else (3, 1)
        self.stem = _ConvNorm(channels, width, size, stride, **settings)
        self.large_stem = large_stem
        features = width
        names = []
        for stage, blocks in enumerate(stages):
            stage_width = width << stage
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                block = _Block(features, stage_width, stride, bottleneck, **settings)
                name = f'stage{stage + 1}_block{number + 1}'
                setattr(self, name, block)
                names.append(name)
                features = stage_width * (4 if bottleneck else 1)
        self.names = tuple(names)
        self.head = nnx.Linear(features, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        hidden = nnx.relu(self.stem(images, train))
        if self.large_stem:
            hidden = nnx.max_pool(hidden, (3, 3), (2, 2), padding='SAME')
        for name in self.names:
            block = getattr(self, name)
            hidden = block(hidden, train)
        features = hidden.mean(axis=(1, 2))
        return self.head(features)


class _EncoderLayer(nnx.Module):
    """Attention and two dense layers, each after a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int, dtype: Any, rngs: nnx.Rngs):
        settings: Any = {'dtype': dtype, 'rngs': rngs}
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-6, **settings)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **settings)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-6, **settings)
        self.dense1 = nnx.Linear(width, hidden, **settings)
        self.dense2 = nnx.Linear(hidden, width, **settings)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        normed = self.norm1(tokens)
        tokens = tokens + self.attention(normed)
        normed = self.norm2(tokens)
        hidden = nnx.gelu(self.dense1(normed))
        return tokens + self.dense2(hidden)


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
        dtype: Any,
        *,
        rngs: nnx.Rngs,
    ):
        rows, columns, channels = image
        if rows % patch or columns % patch:
            raise ValueError(
                f'model.patch {patch} does not divide images of {rows}x{columns} pixels'
            )
        settings: Any = {'dtype': dtype, 'rngs': rngs}
        self.patch = patch
        self.layers = layers
        patches = (rows // patch) * (columns // patch)
        tokens = patches + 1
        self.embed = nnx.Linear(patch * patch * channels, width, **settings)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        key = rngs.params()
        positions = jax.random.normal(key, (1, tokens, width))
        self.positions = nnx.Param(0.02 * positions)
        for number in range(layers):
            layer = _EncoderLayer(width, heads, hidden, dtype, rngs)
            setattr(self, f'layer{number + 1}', layer)
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, **settings)
        self.head = nnx.Linear(width, classes, **settings)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        del train
        batch, height, width, channels = images.shape
        rows, columns = height // self.patch, width // self.patch
        patches = images.reshape(batch, rows, self.patch, columns, self.patch, channels)
        patches = patches.swapaxes(2, 3)
        patches = patches.reshape(batch, rows * columns, -1)
        tokens = self.embed(patches)
        class_token = self.token[...].astype(tokens.dtype)
        first = jnp.broadcast_to(class_token, (batch, 1, tokens.shape[-1]))
        tokens = jnp.concatenate([first, tokens], axis=1)
        tokens = tokens + self.positions[...].astype(tokens.dtype)
        for number in range(self.layers):
            layer = getattr(self, f'layer{number + 1}')
            tokens = layer(tokens)
        normed = self.norm(tokens)
        return self.head(normed[:, 0])


class LeNet(nnx.Module):
    """LeNet-300-100: dense layers alone (LeCun et al., 1998).

    Weights and biases begin uniformly between -1/√inputs and 1/√inputs of their layer, as in
    PyTorch, where the results that this model is compared with were trained.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], classes: int, dtype: Any, *, rngs: nnx.Rngs
    ):
        sizes = [inputs, *hidden, classes]
        self.depth = len(sizes) - 1
        for number in range(self.depth):
            inputs, outputs = sizes[number], sizes[number + 1]
            bound = inputs**-0.5
            init = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
            layer = nnx.Linear(
                inputs, outputs, kernel_init=init, bias_init=init, dtype=dtype, rngs=rngs
            )
            setattr(self, f'dense{number + 1}', layer)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        del train
        hidden = images.reshape(len(images), -1)
        for number in range(1, self.depth):
            layer = getattr(self, f'dense{number}')
            hidden = nnx.relu(layer(hidden))
        last = getattr(self, f'dense{self.depth}')
        return last(hidden)


class ClientCNN(nnx.Module):
    """Two 3x3 convolutions, a pooling, and two dense layers.

    `side` is the height and width of an image; the rates in `dropout` hold before each dense layer.
    """

    def __init__(
        self,
        side: int,
        filters: Sequence[int],
        hidden: int,
        classes: int,
        dropout: Sequence[float],
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dropout = tuple(dropout)
        convolve = fastest_convolution()
        convolution = functools.partial(
            nnx.Conv, padding='VALID', dtype=dtype, conv_general_dilated=convolve, rngs=rngs
        )
        self.conv1 = convolution(1, filters[0], (3, 3))
        self.conv2 = convolution(filters[0], filters[1], (3, 3))
        pooled_side = (side - 4) // 2
        features = pooled_side * pooled_side * filters[1]
        self.dense = nnx.Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits, float32[batch, classes]; without a key there is no dropout."""
        features = nnx.relu(self.conv1(images))
        features = nnx.relu(self.conv2(features))
        pooled = nnx.max_pool(features, (2, 2), (2, 2))
        features = pooled.reshape(len(images), -1)
        features = self._drop(0, features, key)
        features = nnx.relu(self.dense(features))
        features = self._drop(1, features, key)
        return self.head(features).astype(jnp.float32)

    def _drop(self, layer: int, features: jax.Array, key: jax.Array | None) -> jax.Array:
        rate = self.dropout[layer]
        if key is None or not rate:
            return features
        key = jax.random.fold_in(key, layer)
        is_kept = jax.random.bernoulli(key, 1 - rate, features.shape)
        return jnp.where(is_kept, features / (1 - rate), 0.0)


class QNetwork(nnx.Module):
    """From observations to the value of each action.

    `shape` is height, width and channels; each convolution has its filters, its size and its stride.
    """

    def __init__(
        self,
        shape: Sequence[int],
        filters: Sequence[int],
        kernel_sizes: Sequence[int],
        strides: Sequence[int],
        hidden: int,
        actions: int,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        height, width, channels = shape
        self.layers = len(filters)
        # With strides XLA's own convolution is the faster, on a CPU, too.
        convolve = jax.lax.conv_general_dilated if max(strides) > 1 else fastest_convolution()
        convolution = functools.partial(
            nnx.Conv, padding='VALID', dtype=dtype, conv_general_dilated=convolve, rngs=rngs
        )
        settings = zip(filters, kernel_sizes, strides, strict=True)
        for number, (outputs, size, stride) in enumerate(settings):
            layer = convolution(channels, outputs, (size, size), stride)
            setattr(self, f'conv{number + 1}', layer)
            height = (height - size) // stride + 1
            width = (width - size) // stride + 1
            channels = outputs
        features = height * width * channels
        self.dense = nnx.Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, actions, dtype=dtype, rngs=rngs)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """The values, float32[batch, actions]; uint8 observations are brightness, over 255."""
        features = observations.astype(self.dtype)
        if observations.dtype == jnp.uint8:
            features = features / 255
        for number in range(self.layers):
            layer = getattr(self, f'conv{number + 1}')
            features = nnx.relu(layer(features))
        features = features.reshape(len(features), -1)
        features = nnx.relu(self.dense(features))
        return self.head(features).astype(jnp.float32)
