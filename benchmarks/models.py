"""Models to time, in plain JAX: parameters are a dictionary, a model is the functions that make and use it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]


class Batch(NamedTuple):
    """What a model is trained on."""

    inputs: jax.Array
    labels: jax.Array


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A multilayer perceptron with ReLUs, on random images."""

    widths: tuple[int, ...]
    batch_size: int

    def init(self) -> Params:
        """Random parameters."""
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        return {
            f'layer_{i}': _dense(jax.random.key(i), *pair, jnp.float32)
            for i, pair in enumerate(pairs)
        }

    def batch(self) -> Batch:
        """Random images and labels."""
        images = jax.random.normal(jax.random.key(0), (self.batch_size, self.widths[0]))
        return Batch(
            images, jax.random.randint(jax.random.key(1), (self.batch_size,), 0, self.widths[-1])
        )

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """The mean cross entropy."""
        return mean_cross_entropy(self.logits(params, batch.inputs), batch.labels)

    def logits(self, params: Params, images: jax.Array) -> jax.Array:
        """What the model makes of images, `[batch, classes]`."""
        *hidden, head = params.values()
        x = functools.reduce(lambda x, layer: jax.nn.relu(_apply(layer, x)), hidden, images)
        return _apply(head, x)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer on random text: 16 arrays a block, and 6 around the blocks.

    Where it is scanned, the blocks are stacked, and one loop goes through them. With RMSNorm its norms have no biases.
    """

    blocks: int
    width: int
    heads: int
    vocabulary: int
    batch_size: int
    sequence: int
    dtype: Any = jnp.float32
    scanned: bool = False
    rms_norm: bool = False

    def init(self) -> Params:
        """Random parameters."""
        keys = jax.random.split(jax.random.key(0), self.blocks + 3)
        blocks = {f'block_{i:02}': self._block(keys[i]) for i in range(self.blocks)}
        if self.scanned:
            blocks = {'blocks': jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks.values())}
        return {
            'tokens': 0.02 * jax.random.normal(keys[-3], (self.vocabulary, self.width), self.dtype),
            'positions': 0.02
            * jax.random.normal(keys[-2], (self.sequence, self.width), self.dtype),
            **blocks,
            'norm': self._norm(),
            'head': _dense(keys[-1], self.width, self.vocabulary, self.dtype),
        }

    def batch(self) -> Batch:
        """Random tokens, each to be told from those before it."""
        tokens = jax.random.randint(
            jax.random.key(0), (self.batch_size, self.sequence + 1), 0, self.vocabulary
        )
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """The mean cross entropy."""
        return self.losses(params, batch).mean()

    def losses(self, params: Params, batch: Batch) -> jax.Array:
        """The cross entropy of each token."""
        return _cross_entropies(self.logits(params, batch.inputs), batch.labels)

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """What the model makes of tokens, `[batch, sequence, vocabulary]`."""
        x = params['tokens'][tokens] + params['positions']
        if self.scanned:
            x, _ = jax.lax.scan(
                lambda x, block: (self._through(block, x), None), x, params['blocks']
            )
        else:
            for i in range(self.blocks):
                x = self._through(params[f'block_{i:02}'], x)
        return _apply(params['head'], _normalized(params['norm'], x))

    def _through(self, block: Params, x: jax.Array) -> jax.Array:
        x = x + self._attention(block, _normalized(block['norm_1'], x))
        hidden = jax.nn.gelu(_apply(block['up'], _normalized(block['norm_2'], x)))
        return x + _apply(block['down'], hidden)

    def _block(self, key: jax.Array) -> Params:
        width = self.width
        shapes = dict.fromkeys(('query', 'key', 'value', 'out'), (width, width))
        shapes |= {'up': (width, 4 * width), 'down': (4 * width, width)}
        keys = jax.random.split(key, len(shapes))
        layers = {
            name: _dense(key, *shapes[name], self.dtype)
            for name, key in zip(shapes, keys, strict=True)
        }
        return {'norm_1': self._norm(), 'norm_2': self._norm(), **layers}

    def _norm(self) -> Params:
        scale = {'scale': jnp.ones(self.width, self.dtype)}
        return scale if self.rms_norm else scale | {'bias': jnp.zeros(self.width, self.dtype)}

    def _attention(self, block: Params, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:-1], self.heads, self.width // self.heads)
        query, key, value = (
            _apply(block[name], x).reshape(heads) for name in ('query', 'key', 'value')
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return _apply(block['out'], mixed.reshape(x.shape))


@dataclasses.dataclass(frozen=True)
class BareTransformer:
    """A transformer of four kernels a layer, as in GPT-2, and nothing else: no biases, no embeddings."""

    layers: int
    width: int
    heads: int
    batch_size: int
    sequence: int

    def init(self) -> Params:
        """Random parameters."""
        width = self.width
        shapes = {
            'query_key_value': (width, 3 * width),
            'out': (width, width),
            'up': (width, 4 * width),
            'down': (4 * width, width),
        }
        params: Params = {}
        for i, key in enumerate(jax.random.split(jax.random.key(0), self.layers)):
            keys = jax.random.split(key, len(shapes))
            params[f'layer_{i:02}'] = {
                name: jax.random.normal(key, shape) / jnp.sqrt(shape[0])
                for key, (name, shape) in zip(keys, shapes.items(), strict=True)
            }
        return params

    def batch(self) -> Batch:
        """Random vectors, and others that they are to become."""
        shape = self.batch_size, self.sequence, self.width
        return Batch(*jax.random.normal(jax.random.key(0), (2, *shape)))

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """The mean squared error."""
        x = batch.inputs
        for layer in params.values():
            x = self._through(layer, x)
        return jnp.mean((x - batch.labels) ** 2)

    def _through(self, layer: Params, x: jax.Array) -> jax.Array:
        projected = jax.nn.standardize(x) @ layer['query_key_value']
        heads = projected.reshape(*x.shape[:2], 3 * self.heads, -1)
        mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer['out']
        return x + jax.nn.gelu(jax.nn.standardize(x) @ layer['up']) @ layer['down']


Model = Mlp | Transformer | BareTransformer

TRANSFORMERS = {
    'small': Transformer(1, 16, heads=2, vocabulary=32, batch_size=2, sequence=8),
    # 5.3 million parameters.
    'cpu': Transformer(6, 256, heads=4, vocabulary=1024, batch_size=4, sequence=64),
    # 136 million.
    'gpu': Transformer(
        12, 768, heads=12, vocabulary=32768, batch_size=8, sequence=512, dtype=jnp.bfloat16
    ),
}
_MLP = Mlp((784, 300, 100, 10), batch_size=128)
# What is trained at each size; small ones compile fast.
TRAINED: dict[str, dict[str, Model]] = {
    'small': {'MLP': Mlp((8, 8, 4), batch_size=4)},
    'cpu': {'transformer': TRANSFORMERS['cpu'], 'MLP': _MLP},
    'gpu': {'transformer': TRANSFORMERS['gpu'], 'MLP': _MLP},
}


def _dense(key: jax.Array, inputs: int, outputs: int, dtype: Any) -> Params:
    kernel = jax.random.normal(key, (inputs, outputs), dtype) / jnp.sqrt(inputs).astype(dtype)
    return {'kernel': kernel, 'bias': jnp.zeros(outputs, dtype)}


def _apply(layer: Params, x: jax.Array) -> jax.Array:
    return x @ layer['kernel'] + layer['bias']


def _normalized(layer: Params, x: jax.Array) -> jax.Array:
    if 'bias' not in layer:
        mean_square = jnp.mean(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + 1e-6) * layer['scale']
    return jax.nn.standardize(x, axis=-1) * layer['scale'] + layer['bias']


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean of the cross entropies, in single precision."""
    return _cross_entropies(logits, labels).mean()


def _cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
