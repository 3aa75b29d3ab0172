"""Modules for the tests of `shrink`: those whose code follows smaller arrays, and those whose code does not."""

import inspect

import equinox as eqx
import jax
from flax import linen, nnx


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 12, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(12, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(12, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.drop(x.mean((1, 2))))


class Depthwise(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.pointwise = nnx.Conv(8, 4, (1, 1), rngs=rngs)

    def __call__(self, x):
        return self.pointwise(nnx.relu(self.depthwise(nnx.relu(self.stem(x))))).mean((1, 2))


class GroupNorm(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=4, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.stem(x))).mean((1, 2)))


class Transformer(nnx.Module):
    """A block as they are written with Flax's own layers."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(3, 16, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, in_features=16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 24, rngs=rngs), nnx.Linear(24, 16, rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.down(nnx.gelu(self.up(self.norm2(x)))))


class Ambiguous(nnx.Module):
    """`width` is the width of the first layer and of the second one, which differ afterwards."""

    def __init__(self, rngs):
        self.width = 8
        self.up, self.middle = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.up(x)).reshape(-1, self.width)
        return self.down(nnx.relu(self.middle(x)).reshape(-1, self.width))


class EquinoxCNN(eqx.Module):
    conv1: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0])
        has_mode = 'mode' in inspect.signature(eqx.nn.BatchNorm).parameters
        self.norm = eqx.nn.BatchNorm(8, 'batch', **({'mode': 'batch'} if has_mode else {}))
        self.conv2 = eqx.nn.Conv2d(8, 12, 3, padding=1, key=keys[1])
        self.head = eqx.nn.Linear(12, 4, key=keys[2])

    def __call__(self, x, state):
        x, state = self.norm(self.conv1(x), state)
        x = jax.nn.relu(self.conv2(jax.nn.relu(x)))
        return self.head(x.mean((1, 2))), state


class LinenCNN(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        for width in (8, 12):
            x = linen.Conv(width, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        return linen.Dense(4)(x.mean((1, 2)))
