"""The workload `t5`: an encoder-decoder transformer that learns to fill in spans of text, bytes as tokens.

The model is T5 1.1 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683; Shazeer 2020,
https://arxiv.org/abs/2002.05202), bytes as in ByT5 (Xue et al. 2022, https://arxiv.org/abs/2105.13626).
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines import span_corruption
from jaxpruner.baselines.data import check_no_folder
from jaxpruner.baselines.feeds import Feed
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.readers import pipelines
from jaxpruner.baselines.readers.texts import Corpus, read_corpus
from jaxpruner.baselines.recipe import Optimizer, Recipe, Schedule
from jaxpruner.baselines.t5_model import T5, Sizes
from jaxpruner.baselines.task import Metric, Task

SHAKESPEARE = 'tinyshakespeare.txt'
TEST_SHARE = 10  # the last tenth of a text is for testing
SMALL = {
    'vocabulary': 0,
    'width': 64,
    'heads': 4,
    'head_width': 16,
    'mlp_width': 128,
    'layers': 2,
    'buckets': 32,
    'distance': 128,
}
CORRUPTION = {'length': 64, 'noise_density': 0.15, 'mean_span': 3.0, 'test_examples': 256}


class Text(NamedTuple):
    """A text as numbers, from `span_corruption.SYMBOLS` on.

    >>> Text.of(b'hello' * 4).symbols.tobytes()
    b'ehlo'
    """

    train: jax.Array | np.ndarray  # int32[n]
    test: jax.Array | np.ndarray  # int32[m], the last tenth
    symbols: (
        jax.Array | np.ndarray
    )  # uint8[different bytes]; others would be rows of the embedding that nothing uses

    @classmethod
    def of(cls, content: bytes) -> 'Text':
        """Numbers the bytes that occur."""
        symbols, tokens = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
        tokens = tokens.astype(np.int32) + span_corruption.SYMBOLS
        held_out = len(tokens) // TEST_SHARE
        return cls(tokens[:-held_out], tokens[-held_out:], symbols)


class T5Workload:
    """Span corruption; the metric is the loss per predicted token, in nats."""

    name = 't5'
    presets = ('default', 'data', 'full')

    def default(self, preset: str) -> Recipe:
        """The recipe of a preset: the text inside CPython, tiny Shakespeare, or T5 Base on C4 from disk."""
        adam = Optimizer(name='adam', learning_rate=5e-3, clip_norm=1.0)
        small = Recipe(
            't5', data='pydoc', steps=1000, batch_size=32, optimizer=adam, schedule=Schedule(warmup=0.1),
            model=SMALL, task=CORRUPTION,
        )  # fmt: skip
        match preset:
            case 'default':
                return small
            case 'data':
                return small.updated({'preset': preset, 'data': 'tinyshakespeare', 'steps': 3000})
            case 'full':  # as pre-trained by Raffel et al., section 3.1.2
                return Recipe(
                    't5', preset, data='c4', steps=2**19, batch_size=128, eval_every=0.01, dtype='bfloat16',
                    optimizer=Optimizer(name='adafactor', learning_rate=0.01),
                    schedule=Schedule(warmup=10_000 / 2**19, decay='inverse_sqrt'),
                    model=Sizes()._asdict(), task={**CORRUPTION, 'length': 568},
                )  # fmt: skip
        raise ValueError(f't5 has no preset {preset!r}; it has {", ".join(self.presets)}')

    def data(self, recipe: Recipe, data_dir: Path | None) -> Text | Corpus:
        """Reads the text; that of C4 stays on disk but for what is for testing."""
        numbers: Any = recipe.task
        match recipe.data:
            case 'pydoc':
                check_no_folder(recipe.data, data_dir)
                from pydoc_data import topics

                return Text.of(
                    '\n'.join(topics.topics[key] for key in sorted(topics.topics)).encode()
                )
            case 'tinyshakespeare':
                return Text.of(_read_text(data_dir))
            case 'c4':
                if data_dir is None:
                    raise ValueError(
                        'c4 is read from a folder: pass --data-dir with one that holds its files'
                    )
                return read_corpus(data_dir, numbers['length'] * numbers['test_examples'])
        raise ValueError(
            f"t5 reads 'pydoc', 'tinyshakespeare' or 'c4', not {recipe.data!r}: set data to one of them"
        )

    def task(self, recipe: Recipe, data: Text | Corpus) -> Task:
        """The training."""
        numbers: Any = recipe.task
        lengths = span_corruption.Lengths.of(
            numbers['length'], numbers['noise_density'], numbers['mean_span']
        )
        sizes = _sized(recipe, data, lengths)
        test = _tokens(data.test) if isinstance(data, Corpus) else jnp.asarray(data.test)
        if len(test) < lengths.text:
            raise ValueError(
                f'the text of {recipe.data} leaves {len(test)} bytes for testing, too few for examples of '
                f'{lengths.text}: set task.length to at most that'
            )
        model = Functional(lambda rngs: T5(sizes, jnp.dtype(recipe.dtype), rngs=rngs))

        def corrupted(texts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            def one(text: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
                mask = span_corruption.noise_mask(key, lengths)
                return span_corruption.corrupt(text, mask, lengths, sizes.vocabulary)

            return jax.vmap(one)(texts, jax.random.split(key, len(texts)))

        def examples(
            text: jax.Array, starts: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            return corrupted(
                jax.vmap(lambda at: jax.lax.dynamic_slice(text, (at,), (lengths.text,)))(starts),
                key,
            )

        def batch(key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            del step
            train: Any = jnp.asarray(data.train)
            key_place, key_noise = jax.random.split(key)
            starts = jax.random.randint(
                key_place, (recipe.batch_size,), 0, len(train) - lengths.text + 1
            )
            return examples(train, starts, key_noise)

        def loss(params: Any, state: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
            pair = corrupted(_tokens(batch), key) if isinstance(data, Corpus) else batch
            return token_losses(model.module(params), *pair).mean(), state

        def evaluate(params: Any, state: Any) -> dict[str, jax.Array]:
            del state
            starts = jnp.linspace(0, len(test) - lengths.text, numbers['test_examples']).astype(
                jnp.int32
            )
            tests = examples(test, starts, jax.random.key(0))
            losses = jax.lax.map(
                lambda one: token_losses(model.module(params), one[0][None], one[1][None])[0],
                tests,
                batch_size=min(recipe.batch_size, len(starts)),
            )
            return {'loss': losses.mean()}

        def feed(seed: int) -> Feed:
            texts: Any = data.train
            return pipelines.windows(texts, lengths.text, recipe.batch_size, seed)

        return Task(
            metric=Metric('loss', 'low'),
            steps=recipe.steps,
            init=lambda key: model.init(key)[0],
            init_state=lambda params, key: None,
            batch=batch,
            loss=loss,
            evaluate=evaluate,
            feed=feed if isinstance(data, Corpus) else None,
        )


def token_losses(model: T5, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of each target."""
    so_far = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=span_corruption.START)
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs, so_far), targets)


def _tokens(content: Any) -> jax.Array:
    """Bytes as tokens, each with the number that `Corpus.symbols` gives it."""
    return jnp.asarray(content, jnp.int32) + span_corruption.SYMBOLS


def _sized(recipe: Recipe, data: Text | Corpus, lengths: span_corruption.Lengths) -> Sizes:
    model: Any = dict(recipe.model)
    needed = span_corruption.SYMBOLS + len(data.symbols) + lengths.spans
    model['vocabulary'] = model['vocabulary'] or needed
    if model['vocabulary'] < needed:
        raise ValueError(
            f'model.vocabulary is {model["vocabulary"]}, but {recipe.data} needs {needed} '
            f'({len(data.symbols)} different bytes and {lengths.spans} sentinels): set it to 0 or at least that'
        )
    return Sizes(**model)


def _read_text(folder: Path | None) -> bytes:
    if folder is None:
        raise ValueError(
            f'tinyshakespeare is read from a folder: pass --data-dir with one that holds {SHAKESPEARE}'
        )
    path = Path(folder) / SHAKESPEARE
    if not path.is_file():
        raise ValueError(f'{path} does not exist: put tiny Shakespeare (one text file) there')
    return path.read_bytes()
