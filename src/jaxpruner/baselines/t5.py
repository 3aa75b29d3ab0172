"""The workload `t5`: an encoder-decoder transformer that learns to fill in spans of text.

The model is T5 1.1 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683; Shazeer 2020,
https://arxiv.org/abs/2002.05202), bytes are tokens as in ByT5 (Xue et al. 2022, https://arxiv.org/abs/2105.13626).
Sentinels replace spans of a text, and the target is the spans (section 3.1.4 of Raffel et al.); all lengths are known
beforehand, so that it runs inside a compiled program.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpruner.baselines import readers
from jaxpruner.baselines.data import check_no_folder, require_folder
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.readers import ParquetParts
from jaxpruner.baselines.recipe import Recipe, read_presets
from jaxpruner.baselines.task import Examples, Feed, Metric, Metrics, Task, Workload

START = 0  # also padding
END = 1
SYMBOLS = 2  # the first token that stands for text


class Lengths(NamedTuple):
    """How many tokens of an example of `text` tokens are noise, in how many spans.

    >>> Lengths.of(568, noise_density=0.15, mean_span=3.0)  # T5's own
    Lengths(text=568, noise=85, spans=28)
    """

    text: int
    noise: int  # tokens that are replaced
    spans: int  # in so many runs

    @classmethod
    def of(cls, text: int, noise_density: float, mean_span: float) -> 'Lengths':
        """The lengths for a share of noise; a `ValueError` for less text than one span needs."""
        noise = round(text * noise_density)
        spans = max(1, round(noise / mean_span))
        if not 1 <= spans <= noise <= text - spans:
            raise ValueError(
                f'{text} tokens with noise_density {noise_density} and mean_span {mean_span} make '
                f'{noise} tokens of noise in {spans} spans, which does not fit: use longer texts, '
                'or values such as 0.15 and 3'
            )
        return cls(text, noise, spans)


def noise_mask(key: jax.Array, lengths: Lengths) -> jax.Array:
    """Draws which tokens are noise, bool[text]: runs in turn, beginning with a kept one."""
    key_kept, key_noise = jax.random.split(key)
    kept = _segments(key_kept, lengths.text - lengths.noise, lengths.spans)
    noise = _segments(key_noise, lengths.noise, lengths.spans)
    # Of runs, kept and noise in turn.
    ends = jnp.cumsum(jnp.stack([kept, noise], axis=1).reshape(-1))
    run = jnp.searchsorted(ends, jnp.arange(lengths.text), side='right')
    return run % 2 == 1


def corrupt(
    tokens: jax.Array, is_noise: jax.Array, lengths: Lengths, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """Splits a text into inputs int32[tokens that are kept + spans + 1] and targets int32[noise + spans + 1].

    The inputs have a sentinel in place of each span, the targets one before each; both end with `END`. Sentinels are
    the last tokens of the vocabulary, in falling order.

    >>> mask = jnp.array([0, 0, 1, 1, 0, 1], bool)
    >>> text, lengths = jnp.array([2, 3, 4, 5, 6, 7]), Lengths(6, 3, 2)
    >>> inputs, targets = corrupt(text, mask, lengths, vocabulary=100)
    >>> inputs.tolist(), targets.tolist()
    ([2, 3, 99, 6, 98, 1], [99, 4, 5, 98, 7, 1])
    """
    first_of_noise = is_noise & ~jnp.pad(is_noise[:-1], (1, 0))
    sentinels = vocabulary - jnp.cumsum(first_of_noise)

    def compact(is_kept, values, count):
        (positions,) = jnp.nonzero(is_kept, size=count + lengths.spans)
        return jnp.append(values[positions], END).astype(jnp.int32)

    input_values = jnp.where(is_noise, sentinels, tokens)
    inputs = compact(~is_noise | first_of_noise, input_values, lengths.text - lengths.noise)
    # A run's sentinel stands before its first token: each position is doubled.
    is_target = jnp.stack([first_of_noise, is_noise], axis=1).reshape(-1)
    values = jnp.stack([sentinels, tokens], axis=1).reshape(-1)
    return inputs, compact(is_target, values, lengths.noise)


def _segments(key: jax.Array, items: int, segments: int) -> jax.Array:
    """Random lengths of at least 1 that add up to `items`, int[segments], uniform over divisions."""
    cuts = jnp.sort(jax.random.permutation(key, items - 1)[: segments - 1]) + 1
    return jnp.diff(cuts, prepend=0, append=items)


FAN_IN = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal')
MASKED = -1e9  # added to scores of positions that may not be seen


class Sizes(NamedTuple):
    """The sizes of the model."""

    vocabulary: int
    width: int  # of the residual stream
    heads: int
    head_width: int
    mlp_width: int
    layers: int  # of the encoder, and as many of the decoder
    buckets: int  # of relative positions
    distance: int  # from which on all positions share a bucket


class T5(nnx.Module):
    """The model: tokens that are given and tokens so far, to logits of the next token."""

    def __init__(self, sizes: Sizes, **settings: Any):
        init = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(sizes.vocabulary, sizes.width, embedding_init=init, **settings)
        self.encoder = Stack(sizes, False, **settings)
        self.decoder = Stack(sizes, True, **settings)
        self.head = _linear(sizes.width, sizes.vocabulary, **settings)

    def __call__(self, inputs: jax.Array, targets_so_far: jax.Array) -> jax.Array:
        """Logits of each target, float32[batch, target length, vocabulary]; both are int tokens."""
        encoded = self.encoder(self.embedding(inputs))
        decoded = self.decoder(self.embedding(targets_so_far), encoded)
        return self.head(decoded).astype(jnp.float32)


# All layers compute in one dtype and draw from the same numbers, which are their settings.
_linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=FAN_IN)


class Stack(nnx.Module):
    """The encoder, or the decoder: blocks that share one relative position bias."""

    def __init__(self, sizes: Sizes, is_decoder: bool, **settings: Any):
        self.is_decoder = is_decoder
        self.buckets, self.distance = sizes.buckets, sizes.distance
        self.position_bias = nnx.Embed(
            sizes.buckets, sizes.heads, embedding_init=FAN_IN, rngs=settings['rngs']
        )
        self.layers = sizes.layers
        for number in range(sizes.layers):
            setattr(self, f'block{number + 1}', Block(sizes, is_decoder, **settings))
        self.norm = nnx.RMSNorm(sizes.width, **settings)

    def __call__(self, hidden: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        """Runs the blocks."""
        length = hidden.shape[1]
        positions = position_buckets(length, not self.is_decoder, self.buckets, self.distance)
        bias = self.position_bias(jnp.asarray(positions)).transpose(2, 0, 1)
        if self.is_decoder:
            bias += jnp.where(jnp.tri(length, dtype=bool), 0.0, MASKED)
        for number in range(self.layers):
            hidden = getattr(self, f'block{number + 1}')(hidden, bias, encoded)
        return self.norm(hidden)


class Block(nnx.Module):
    """Self-attention, in the decoder attention to what was encoded, and a gated MLP."""

    def __init__(self, sizes: Sizes, is_decoder: bool, **settings: Any):
        self.attention = Attention(sizes, **settings)
        self.attention_norm = nnx.RMSNorm(sizes.width, **settings)
        if is_decoder:
            self.cross_attention = Attention(sizes, **settings)
            self.cross_attention_norm = nnx.RMSNorm(sizes.width, **settings)
        self.gate = _linear(sizes.width, sizes.mlp_width, **settings)
        self.up = _linear(sizes.width, sizes.mlp_width, **settings)
        self.down = _linear(sizes.mlp_width, sizes.width, **settings)
        self.mlp_norm = nnx.RMSNorm(sizes.width, **settings)

    def __call__(
        self, hidden: jax.Array, bias: jax.Array, encoded: jax.Array | None = None
    ) -> jax.Array:
        """Adds to the residual stream."""
        normed = self.attention_norm(hidden)
        hidden += self.attention(normed, normed, bias)
        if encoded is not None:
            normed = self.cross_attention_norm(hidden)
            hidden += self.cross_attention(normed, encoded)
        normed = self.mlp_norm(hidden)
        return hidden + self.down(nnx.gelu(self.gate(normed)) * self.up(normed))


class Attention(nnx.Module):
    """Attention of several heads."""

    def __init__(self, sizes: Sizes, **settings: Any):
        joined = sizes.heads * sizes.head_width
        self.heads = sizes.heads
        self.dtype = settings['dtype']
        # What other models divide the scores by is in the initial query instead.
        narrow = nnx.initializers.variance_scaling(1 / sizes.head_width, 'fan_in', 'normal')
        self.query = _linear(sizes.width, joined, **{**settings, 'kernel_init': narrow})
        self.key = _linear(sizes.width, joined, **settings)
        self.value = _linear(sizes.width, joined, **settings)
        self.out = _linear(joined, sizes.width, **settings)

    def __call__(
        self, queries: jax.Array, seen: jax.Array, bias: jax.Array | None = None
    ) -> jax.Array:
        """Attends from queries [batch, length, width] to `seen` [batch, seen length, width].

        `bias` [heads, length, seen length] is added to the scores.
        """

        def split(joined):
            return joined.reshape(*joined.shape[:2], self.heads, -1)

        query, key = split(self.query(queries)), split(self.key(seen))
        scores = jnp.einsum('bqhd,bkhd->bhqk', query, key).astype(jnp.float32)
        if bias is not None:
            scores += bias
        weights = jax.nn.softmax(scores).astype(self.dtype)
        attended = jnp.einsum('bhqk,bkhd->bqhd', weights, split(self.value(seen)))
        return self.out(attended.reshape(*queries.shape[:2], -1))


def position_buckets(length: int, bidirectional: bool, buckets: int, distance: int) -> np.ndarray:
    """The bucket of each pair of positions, int[length (query), length (key)].

    Near distances have a bucket each, farther ones share ever wider ones, the last one from
    `distance` on. Bidirectional, later positions have half of the buckets; else they share the
    first.

    >>> position_buckets(4, False, 32, 128)[3]
    array([3, 2, 1, 0])
    """
    relative = np.arange(length)[None, :] - np.arange(length)[:, None]
    away = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
    if bidirectional:
        buckets //= 2
    near = buckets // 2
    # In float32 and with its epsilon, as in T5: distances on an edge fall to the same side.
    scaled = np.maximum(away, 1).astype(np.float32) / near + np.finfo(np.float32).eps
    ratio = np.log(scaled) / np.log(distance / near)
    far = np.minimum(near + (ratio * (buckets - near)).astype(int), buckets - 1)
    bucket = np.where(away < near, away, far)
    return bucket + buckets * (relative > 0) if bidirectional else bucket


Array = jax.Array | np.ndarray
SHAKESPEARE = 'tinyshakespeare.txt'
TEST_SHARE = 10  # the last tenth of a text is for testing


class Text(NamedTuple):
    """A text as numbers from 0 on.

    >>> Text.of(b'hello' * 4).symbols.tobytes()
    b'ehlo'
    """

    train: Any  # int[n], or a reader of parts uint8[n] that stay on disk
    test: Array  # int[m], the last tenth
    # uint8[different bytes]; the embedding has no rows for others, which nothing would use.
    symbols: Array

    @classmethod
    def of(cls, content: bytes) -> 'Text':
        """Numbers the bytes that occur."""
        symbols, tokens = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
        tokens = tokens.astype(np.int32)
        held_out = len(tokens) // TEST_SHARE
        return cls(tokens[:-held_out], tokens[-held_out:], symbols)


class T5Workload(Workload):
    """Span corruption; the metric is the loss per predicted token, in nats.

    The presets train on the text inside CPython, on tiny Shakespeare, or T5 Base on C4 from disk.
    """

    name = 't5'
    recipes = read_presets('t5')

    def data(self, recipe: Recipe, data_dir: Path | None) -> Text:
        """As `Workload.data`; the text of C4 stays on disk but for what is for testing."""
        if recipe.data == 'pydoc':
            check_no_folder(recipe.data, data_dir)
            from pydoc_data.topics import topics

            return Text.of('\n'.join(topics[key] for key in sorted(topics)).encode())
        if recipe.data == 'tinyshakespeare':
            folder = require_folder(recipe, data_dir, SHAKESPEARE)
            return Text.of((folder / SHAKESPEARE).read_bytes())
        if recipe.data == 'c4':
            test_bytes = recipe.task['length'] * recipe.task['test_examples']
            folder = require_folder(recipe, data_dir, 'C4')
            return Text(*readers.read_corpus(folder, test_bytes), np.arange(256, dtype=np.uint8))
        raise ValueError(
            f"t5 reads 'pydoc', 'tinyshakespeare' or 'c4', not {recipe.data!r}: set data to one "
            'of them'
        )

    def task(self, recipe: Recipe, data: Text) -> Task:
        """As `Workload.task`; with a vocabulary of 0 there are as many tokens as the text needs.

        Raises a `ValueError` where the text is too short, or the vocabulary too small.
        """
        numbers, sizes = recipe.task, dict(recipe.model)
        lengths = Lengths.of(numbers['length'], numbers['noise_density'], numbers['mean_span'])
        if len(data.test) < lengths.text:
            raise ValueError(
                f'the text of {recipe.data} leaves {len(data.test)} bytes for testing, too few for '
                f'examples of {lengths.text}: set task.length to at most that'
            )
        needed = SYMBOLS + len(data.symbols) + lengths.spans
        sizes['vocabulary'] = sizes['vocabulary'] or needed
        if sizes['vocabulary'] < needed:
            raise ValueError(
                f'model.vocabulary is {sizes["vocabulary"]}, but {recipe.data} needs {needed} '
                f'({len(data.symbols)} different bytes and {lengths.spans} sentinels): set it to 0 '
                'or at least that'
            )
        model = Functional(
            lambda rngs: T5(Sizes(**sizes), dtype=jnp.dtype(recipe.dtype), rngs=rngs)
        )
        filling = _Filling(recipe, data, lengths, sizes['vocabulary'], model)
        return Task(
            metric=Metric('loss', 'low'),
            init=model.init_params,
            batch=filling.batch,
            loss=filling.loss,
            evaluate=filling.evaluate,
            feed=filling.feed if isinstance(data.train, ParquetParts) else None,
        )


@dataclasses.dataclass(frozen=True)
class _Filling:
    """The functions of a task."""

    recipe: Recipe
    data: Text
    lengths: Lengths
    vocabulary: int
    model: Functional

    def batch(self, key: jax.Array, step: jax.Array) -> Examples:
        del step
        train = jnp.asarray(self.data.train)
        key_start, key_noise = jax.random.split(key)
        last = len(train) - self.lengths.text
        starts = jax.random.randint(key_start, (self.recipe.batch_size,), 0, last + 1)
        return self._corrupted(self._cut(train, starts), key_noise)

    def feed(self, seed: int) -> Feed:
        size = self.recipe.batch_size
        return readers.windows(self.data.train, self.lengths.text, size, seed)

    def loss(self, params: Any, state: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        if not isinstance(batch, tuple):  # the feed's texts are not corrupted yet
            batch = self._corrupted(batch, key)
        return self._token_losses(params, batch).mean(), state

    def evaluate(self, params: Any, state: Any) -> Metrics:
        del state
        test = jnp.asarray(self.data.test)
        count = self.recipe.task['test_examples']
        starts = jnp.linspace(0, len(test) - self.lengths.text, count).astype(jnp.int32)
        examples = self._corrupted(self._cut(test, starts), jax.random.key(0))

        def losses_of(example):
            batch = jax.tree.map(lambda tokens: tokens[None], example)
            return self._token_losses(params, batch)[0]

        size = min(self.recipe.batch_size, len(starts))
        return {'loss': jax.lax.map(losses_of, examples, batch_size=size).mean()}

    def _token_losses(self, params: Any, batch: Examples) -> jax.Array:
        """The cross-entropy of each target in nats, float32[batch, target length]."""
        inputs, targets = batch
        so_far = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        logits = self.model.module(params)(inputs, so_far)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    def _cut(self, text: jax.Array, starts: jax.Array) -> jax.Array:
        """Parts of a text, int[starts, length]."""
        length = self.lengths.text
        return jax.vmap(lambda start: jax.lax.dynamic_slice(text, (start,), (length,)))(starts)

    def _corrupted(self, texts: jax.Array, key: jax.Array) -> Examples:
        """Inputs and targets of texts, by noise of their own each."""

        def draw(text, key):
            mask, tokens = noise_mask(key, self.lengths), text.astype(jnp.int32) + SYMBOLS
            return corrupt(tokens, mask, self.lengths, self.vocabulary)

        return jax.vmap(draw)(texts, jax.random.split(key, len(texts)))
