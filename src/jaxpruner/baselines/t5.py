"""The workload `t5`: an encoder-decoder transformer that learns to fill in spans of text.

The model is T5 1.1 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683; Shazeer 2020,
https://arxiv.org/abs/2002.05202), bytes are tokens as in ByT5 (Xue et al. 2022,
https://arxiv.org/abs/2105.13626).
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines import span_corruption
from jaxpruner.baselines.data import check_no_folder
from jaxpruner.baselines.feeds import Feed
from jaxpruner.baselines.metrics import Metrics
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.readers import pipelines
from jaxpruner.baselines.readers.texts import Corpus, read_corpus
from jaxpruner.baselines.recipe import Optimizer, Recipe, Schedule
from jaxpruner.baselines.span_corruption import Lengths
from jaxpruner.baselines.t5_model import T5, Sizes
from jaxpruner.baselines.task import Examples, Metric, PresetRecipes, Task

Array = jax.Array | np.ndarray
SHAKESPEARE = 'tinyshakespeare.txt'
TEST_SHARE = 10  # the last tenth of a text is for testing
_CORRUPTION = {
    'length': 64,
    'noise_density': 0.15,
    'mean_span': 3.0,
    'test_examples': 256,
}
_DEFAULT = Recipe(
    't5',
    data='pydoc',
    steps=1000,
    batch_size=32,
    optimizer=Optimizer(
        name='adam',
        learning_rate=5e-3,
        clip_norm=1.0,
    ),
    schedule=Schedule(warmup=0.1),
    model={
        'vocabulary': 0,
        'width': 64,
        'heads': 4,
        'head_width': 16,
        'mlp_width': 128,
        'layers': 2,
        'buckets': 32,
        'distance': 128,
    },
    task=_CORRUPTION,
)
# As pre-trained by Raffel et al., section 3.1.2.
_FULL = Recipe(
    't5',
    preset='full',
    data='c4',
    steps=2**19,
    batch_size=128,
    eval_every=0.01,
    dtype='bfloat16',
    optimizer=Optimizer(name='adafactor', learning_rate=0.01),
    schedule=Schedule(warmup=10_000 / 2**19, decay='inverse_sqrt'),
    model=Sizes()._asdict(),
    task={**_CORRUPTION, 'length': 568},
)
_SHAKESPEARE = {'preset': 'data', 'data': 'tinyshakespeare', 'steps': 3000}
_RECIPES = {'default': _DEFAULT, 'data': _DEFAULT.updated(_SHAKESPEARE), 'full': _FULL}


class Text(NamedTuple):
    """A text as numbers, from `span_corruption.SYMBOLS` on.

    >>> Text.of(b'hello' * 4).symbols.tobytes()
    b'ehlo'
    """

    train: Array  # int32[n]
    test: Array  # int32[m], the last tenth
    # uint8[different bytes]; the embedding has no rows for others, which nothing would use.
    symbols: Array

    @classmethod
    def of(cls, content: bytes) -> 'Text':
        """Numbers the bytes that occur."""
        all_bytes = np.frombuffer(content, np.uint8)
        symbols, tokens = np.unique(all_bytes, return_inverse=True)
        tokens = tokens.astype(np.int32) + span_corruption.SYMBOLS
        held_out = len(tokens) // TEST_SHARE
        return cls(tokens[:-held_out], tokens[-held_out:], symbols)


class T5Workload(PresetRecipes):
    """Span corruption; the metric is the loss per predicted token, in nats.

    The presets train on the text inside CPython, on tiny Shakespeare, or T5 Base on C4 from disk.
    """

    name = 't5'
    recipes = _RECIPES

    def data(self, recipe: Recipe, data_dir: Path | None) -> Text | Corpus:
        """As `Workload.data`; the text of C4 stays on disk but for what is for testing."""
        numbers: Any = recipe.task
        if recipe.data == 'pydoc':
            check_no_folder(recipe.data, data_dir)
            from pydoc_data.topics import topics

            text = '\n'.join(topics[key] for key in sorted(topics))
            return Text.of(text.encode())
        if recipe.data == 'tinyshakespeare':
            path = _folder(recipe, data_dir, SHAKESPEARE) / SHAKESPEARE
            if not path.is_file():
                raise ValueError(
                    f'{path} does not exist: put tiny Shakespeare (one text file) there'
                )
            return Text.of(path.read_bytes())
        if recipe.data == 'c4':
            test_bytes = numbers['length'] * numbers['test_examples']
            folder = _folder(recipe, data_dir, 'its files')
            return read_corpus(folder, test_bytes)
        raise ValueError(
            f"t5 reads 'pydoc', 'tinyshakespeare' or 'c4', not {recipe.data!r}: set data to one "
            'of them'
        )

    def task(self, recipe: Recipe, data: Text | Corpus) -> Task:
        """As `Workload.task`; with a vocabulary of 0 there are as many tokens as the text needs.

        Raises a `ValueError` where the text is too short, or the vocabulary too small.
        """
        numbers: Any = recipe.task
        lengths = Lengths.of(numbers['length'], numbers['noise_density'], numbers['mean_span'])
        if len(data.test) < lengths.text:
            raise ValueError(
                f'the text of {recipe.data} leaves {len(data.test)} bytes for testing, too few for '
                f'examples of {lengths.text}: set task.length to at most that'
            )
        sizes = _sizes(recipe, data, lengths)
        dtype = jnp.dtype(recipe.dtype)
        model = Functional(lambda rngs: T5(sizes, dtype, rngs=rngs))
        filling = _Filling(recipe, data, lengths, sizes.vocabulary, model)
        return Task(
            metric=Metric('loss', 'low'),
            steps=recipe.steps,
            init=model.init_params,
            batch=filling.batch,
            loss=filling.loss,
            evaluate=filling.evaluate,
            feed=filling.feed if isinstance(data, Corpus) else None,
        )


@dataclasses.dataclass(frozen=True)
class _Filling:
    """The functions of a task."""

    recipe: Recipe
    data: Any  # Text, or Corpus
    lengths: Lengths
    vocabulary: int
    model: Functional

    def batch(self, key: jax.Array, step: jax.Array) -> Examples:
        del step
        train = jnp.asarray(self.data.train)
        key_start, key_noise = jax.random.split(key)
        shape = (self.recipe.batch_size,)
        last = len(train) - self.lengths.text
        starts = jax.random.randint(key_start, shape, 0, last + 1)
        texts = self._cut(train, starts)
        return self._corrupted(texts, key_noise)

    def loss(self, params: Any, state: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        if isinstance(self.data, Corpus):  # the feed's texts are not corrupted yet
            batch = self._corrupted(_as_tokens(batch), key)
        inputs, targets = batch
        model = self.model.module(params)
        losses = _token_losses(model, inputs, targets)
        return losses.mean(), state

    def evaluate(self, params: Any, state: Any) -> Metrics:
        del state
        test = jnp.asarray(self.data.test)
        if isinstance(self.data, Corpus):
            test = _as_tokens(test)
        count: Any = self.recipe.task['test_examples']
        last = len(test) - self.lengths.text
        starts = jnp.linspace(0, last, count).astype(jnp.int32)
        texts = self._cut(test, starts)
        examples = self._corrupted(texts, jax.random.key(0))

        model = self.model.module(params)

        def losses_of(example):
            inputs, targets = example
            return _token_losses(model, inputs[None], targets[None])[0]

        size = min(self.recipe.batch_size, len(starts))
        losses = jax.lax.map(losses_of, examples, batch_size=size)
        return {'loss': losses.mean()}

    def feed(self, seed: int) -> Feed:
        length = self.lengths.text
        size = self.recipe.batch_size
        return pipelines.windows(self.data.train, length, size, seed)

    def _cut(self, text: jax.Array, starts: jax.Array) -> jax.Array:
        """Parts of a text, int[starts, length]."""

        def cut(start):
            return jax.lax.dynamic_slice(text, (start,), (self.lengths.text,))

        return jax.vmap(cut)(starts)

    def _corrupted(self, texts: jax.Array, key: jax.Array) -> Examples:
        """Inputs and targets of texts, by noise of their own each."""

        def corrupt(text, key):
            mask = span_corruption.noise_mask(key, self.lengths)
            return span_corruption.corrupt(text, mask, self.lengths, self.vocabulary)

        keys = jax.random.split(key, len(texts))
        return jax.vmap(corrupt)(texts, keys)


def _token_losses(model: T5, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of each target in nats, float32[batch, target length]."""
    widths = (0, 0), (1, 0)
    so_far = jnp.pad(targets[:, :-1], widths, constant_values=span_corruption.START)
    logits = model(inputs, so_far)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _as_tokens(content: Any) -> jax.Array:
    """Bytes as tokens, each with the number that `Corpus.symbols` gives it."""
    return jnp.asarray(content, jnp.int32) + span_corruption.SYMBOLS


def _sizes(recipe: Recipe, data: Text | Corpus, lengths: Lengths) -> Sizes:
    sizes: Any = dict(recipe.model)
    needed = span_corruption.SYMBOLS + len(data.symbols) + lengths.spans
    sizes['vocabulary'] = sizes['vocabulary'] or needed
    if sizes['vocabulary'] < needed:
        raise ValueError(
            f'model.vocabulary is {sizes["vocabulary"]}, but {recipe.data} needs {needed} '
            f'({len(data.symbols)} different bytes and {lengths.spans} sentinels): set it to 0 or '
            'at least that'
        )
    return Sizes(**sizes)


def _folder(recipe: Recipe, folder: Path | None, content: str) -> Path:
    if folder is None:
        raise ValueError(
            f'{recipe.data} is read from a folder: pass --data-dir with one that holds {content}'
        )
    return Path(folder)
