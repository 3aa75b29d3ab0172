"""A character transformer for `train_block_sparse.py`: the loss against the seconds of training."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oneshot_shakespeare_training import Text, Transformer, draw, windows
from train_block_sparse_methods import Run, block_model, block_run, dense_run, masked_run, rigl

EVALUATIONS = 20  # in a run
PRUNED = ('*/attention/*/kernel', '*/up/kernel', '*/down/kernel')


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """Sizes of the model, and its blocks."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch_size: int = 16
    block: tuple[int, int] = (4, 64)
    low_rank: int = 4
    validation_batches: int = 16


SMALL = TextSettings(
    1, 16, 2, context=16, batch_size=4, block=(2, 8), low_rank=0, validation_batches=1
)


def curve(
    text: Text,
    settings: TextSettings,
    method: str,
    sparsity: float,
    steps: int,
    seed: int,
    show: Callable[..., None],
) -> dict[str, Any]:
    """Trains a method; returns seconds and validation losses, in nats a character."""
    model = Transformer(
        text.symbols, settings.layers, settings.width, settings.heads, settings.context
    )
    tokens = jnp.zeros((settings.batch_size, settings.context), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), tokens)['params']

    def apply_fn(params: Any, tokens: jax.Array) -> Any:
        return model.apply({'params': params}, tokens)

    run, weights = _run_of(method, apply_fn, params, tokens, settings, sparsity, steps, seed)
    characters, key = jnp.asarray(text.train), jax.random.key(seed)
    pick = jax.jit(lambda key: draw(characters, key, settings.batch_size, settings.context))
    seconds, losses = [], []
    for number in range(steps):
        sequences = pick(jax.random.fold_in(key, number))
        run.advance(sequences[:, :-1], sequences[:, 1:], number)
        show(method, number + 1)
        if (number + 1) % max(1, steps // EVALUATIONS) == 0:
            seconds.append(run.seconds)
            losses.append(_validation_loss(run, text, settings))
    return {
        'method': method,
        'sparsity': sparsity,
        'seed': seed,
        'steps': steps,
        'weights': weights,
        'seconds': seconds,
        'losses': losses,
    }


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _run_of(
    method: str,
    apply_fn: Callable[..., Any],
    params: Any,
    tokens: jax.Array,
    settings: TextSettings,
    sparsity: float,
    steps: int,
    seed: int,
) -> tuple[Run, int]:
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, -(-steps // 20), steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1))
    if method == 'dense':
        weights = sum(leaf.size for leaf in jax.tree.leaves(params))
        return dense_run(apply_fn, params, tx, _cross_entropy), weights
    model = block_model(
        apply_fn,
        params,
        tokens,
        steps,
        sparsity=dict.fromkeys(PRUNED, sparsity),
        block=settings.block,
        low_rank=settings.low_rank,
        rng_seed=seed,
    )
    if method == 'masks':
        pruner = rigl(model, steps, seed)
        return masked_run(apply_fn, params, tx, _cross_entropy, pruner), model.plan.kept
    return block_run(model, params, tx, _cross_entropy), model.plan.kept


def _validation_loss(run: Run, text: Text, settings: TextSettings) -> float:
    sequences = windows(text.validation, settings.context)
    losses = []
    batches = len(sequences) // settings.batch_size
    for batch in range(min(batches, settings.validation_batches)):
        rows = sequences[batch * settings.batch_size :][: settings.batch_size]
        losses.append(_cross_entropy(run.outputs(rows[:, :-1]), rows[:, 1:]))
    return float(np.mean(losses))


def draw_curves(figure: Any, curves: Sequence[dict[str, Any]]) -> None:
    """Draws the losses over the seconds."""
    from jaxpruner.report import figures

    axes = figure.subplots()
    names = {'dense': 'dense', 'masks': 'RigL with masks', 'blocks': 'blocks and low rank'}
    styles = figures.styles_of(list(names))
    for found in curves:
        method = found['method']
        label = f'{names[method]} ({found["weights"] / 1e6:.2g} million weights)'
        axes.plot(found['seconds'], found['losses'], label=label, markersize=4, **styles[method])
    axes.set_xlabel('seconds of training')
    axes.set_ylabel('validation loss (nats a character)')
    axes.legend(frameon=False, fontsize=9)
    figures.clean(axes, 'y')
