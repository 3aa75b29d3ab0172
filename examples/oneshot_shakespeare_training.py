"""The model of the one-shot example, a transformer that predicts the next character, its recipe, and its training."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines.checkpointing import CellKey, Checkpoints, Progress
from jaxpruner.baselines.recipe import Optimizer, Recipe, Schedule
from jaxpruner.baselines.t5 import SYMBOLS, T5Workload
from jaxpruner.baselines.training import make_optimizer

SAVE_EVERY = 100  # steps
RECIPE = Recipe(
    workload='shakespeare',
    data='tinyshakespeare',
    steps=2500,
    batch_size=16,
    optimizer=Optimizer('adamw', learning_rate=2e-3, beta2=0.99, weight_decay=0.1, clip_norm=1.0),
    schedule=Schedule(warmup=0.05),
    model={'layers': 4, 'width': 160, 'heads': 4, 'context': 128},
    task={
        'sparsities': (0.5, 0.6),
        'n_by_m': '2:4',
        'calibration_sequences': 128,
        'calibration_seed': 0,
    },
)
# Shows that everything runs, on the text inside CPython, and no more.
SMALL = RECIPE.updated(
    {
        'preset': 'small',
        'data': 'pydoc',
        'steps': 20,
        'batch_size': 4,
        'model': {'layers': 1, 'width': 16, 'heads': 2, 'context': 16},
        'task': {'calibration_sequences': 8},
    }
)
SMALL_TEXT = 20_000  # characters


class Text(NamedTuple):
    """A text as numbers from 0 on, the last tenth held out."""

    train: np.ndarray  # int32[n]
    validation: np.ndarray  # int32[m]
    symbols: int


class Block(nn.Module):
    """Attention to what came before, and an MLP."""

    heads: int

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads, name='attention')(
            nn.LayerNorm(name='norm_1')(x), mask=mask
        )
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1], name='up')(nn.LayerNorm(name='norm_2')(x)))
        return x + nn.Dense(x.shape[-1], name='down')(hidden)


class Transformer(nn.Module):
    """A decoder-only transformer with learnt positions."""

    symbols: int
    layers: int
    width: int
    heads: int
    context: int

    @nn.compact
    def __call__(self, tokens):
        positions = self.param(
            'positions', nn.initializers.normal(0.02), (self.context, self.width)
        )
        x = (
            nn.Embed(self.symbols, self.width, name='tokens')(tokens)
            + positions[: tokens.shape[-1]]
        )
        for layer in range(self.layers):
            x = Block(self.heads, name=f'block_{layer}')(x)
        return nn.Dense(self.symbols, name='head')(nn.LayerNorm(name='norm')(x))


class Trained(NamedTuple):
    """A trained model."""

    seed: int
    params: Any
    seconds: float  # that the training took


class Training:
    """The training of a recipe on a text, whose seeds share their compiled programs."""

    def __init__(self, recipe: Recipe, text: Text):
        sizes: Any = recipe.model
        self.recipe, self.context = recipe, sizes['context']
        self._optimizer = make_optimizer(recipe)
        self._model = Transformer(text.symbols, **sizes)
        self._train = jnp.asarray(text.train)
        self._step = jax.jit(self._one_step, donate_argnums=(0, 1))

    def apply(self, params: Any, tokens: jax.Array) -> jax.Array:
        """The logits float[batch, characters, symbols] of the characters that follow."""
        return self._model.apply({'params': params}, tokens)

    def losses(self, params: Any, sequences: jax.Array) -> jax.Array:
        """The mean loss of each sequence int[batch, context + 1], in nats a character."""
        logits = self.apply(params, sequences[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean(-1)

    @functools.cached_property
    def evaluate(self) -> Callable[[Any, jax.Array], jax.Array]:
        """`losses`, compiled, a batch of sequences at a time."""

        def evaluate(params: Any, sequences: jax.Array) -> jax.Array:
            one = lambda sequence: self.losses(params, sequence[None])[0]  # noqa: E731
            return jax.lax.map(
                one, sequences, batch_size=min(self.recipe.batch_size, len(sequences))
            )

        return jax.jit(evaluate)

    def train(
        self,
        seed: int,
        checkpoints: Checkpoints,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> Trained:
        """Trains a model, from where its last checkpoint is.

        Args:
          seed: of the parameters and batches.
          checkpoints: of the recipe; the last one of each seed stays, so that the model is not trained again.
          on_step: called after each step, with the number of steps.
        """
        params = self.start(seed)
        carry = params, self._optimizer.init(params)
        progress = Progress([CellKey('no_prune', 0.0, seed)], step=0)
        for begun in checkpoints.begun():
            if list(begun.cells) == progress.cells:
                progress, carry = checkpoints.restore(begun, carry) or (progress, carry)
        began = time.perf_counter() - progress.seconds
        for step in range(progress.step, self.recipe.steps):
            carry = self._step(*carry, jax.random.key(seed), step)
            on_step(step + 1)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == self.recipe.steps:
                jax.block_until_ready(carry)
                progress = progress._replace(step=step + 1, seconds=time.perf_counter() - began)
                checkpoints.save(progress, carry)
        return Trained(seed, carry[0], progress.seconds)

    def start(self, seed: int) -> Any:
        """Random parameters."""
        tokens = jnp.zeros((1, self.context), jnp.int32)
        return jax.jit(self._model.init)(jax.random.key(seed), tokens)['params']

    def _one_step(
        self, params: Any, state: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Any, Any]:
        batch = draw(
            self._train, jax.random.fold_in(key, step), self.recipe.batch_size, self.context
        )
        grads = jax.grad(lambda params: self.losses(params, batch).mean())(params)
        updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def read_text(recipe: Recipe, data_dir: Path | None) -> Text:
    """Reads the text of a recipe.

    Raises:
      ValueError: the folder does not hold it.
    """
    workload = T5Workload()
    found: Any = workload.data(workload.default('default').updated({'data': recipe.data}), data_dir)
    train, validation = (np.asarray(part) - SYMBOLS for part in (found.train, found.test))
    if recipe.preset == 'small':
        train, validation = train[:SMALL_TEXT], validation[: SMALL_TEXT // 10]
    return Text(train, validation, len(found.symbols))


def draw(text: jax.Array, key: jax.Array, number: int, context: int) -> jax.Array:
    """Sequences from random places of a text, int[number, context + 1]."""
    starts = jax.random.randint(key, (number,), 0, len(text) - context)
    return jax.vmap(lambda start: jax.lax.dynamic_slice(text, (start,), (context + 1,)))(starts)


def windows(text: np.ndarray, context: int) -> jax.Array:
    """A text from its beginning to its end, int[number, context + 1]; each sequence predicts its last characters."""
    starts = np.arange(0, len(text) - context, context)
    return jnp.asarray(text[starts[:, None] + np.arange(context + 1)])
