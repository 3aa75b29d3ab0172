"""Masks of all leaves of a model, ranked leaf by leaf or together, against one reading of the leaves."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxpruner
from benchmarks.models import BareTransformer
from benchmarks.report import Row
from benchmarks.selection import SPARSITY, number_kept
from benchmarks.timing import Stopwatch, interleaved, ratio

Shape = tuple[int, ...]


def _kernels(layers: int, width: int) -> list[Shape]:
    model = BareTransformer(layers, width, heads=4, batch_size=1, sequence=1)
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model.init))]


LEAVES = {
    '96 leaves of 0.2 million': _kernels(24, 256),
    '200 leaves of 10,000': [(100, 100)] * 200,
    '32 leaves of 4 million': [(2000, 2000)] * 32,
}
SIZES = {
    'small': {'4 leaves of 768': _kernels(1, 16)},
    'cpu': LEAVES,
    'gpu': {**LEAVES, '80 leaves of 13 million': _kernels(20, 2048)},
}
PRUNERS = {
    'leaf by leaf': jaxpruner.MagnitudePruning(),
    'together': jaxpruner.GlobalMagnitudePruning(),
}
ROUNDS = 10
COLUMNS = (
    'milliseconds',
    'passes over the memory',
    'temporary bytes per weight',
    'temporary MiB',
    'seconds to lower and compile',
    'core seconds of that',
    'fusions',
)


def run(size: str, rounds: int) -> list[Row]:
    """Times the masks of normal magnitudes."""
    rows = []
    for name, shapes in SIZES[size].items():
        rows += _rows(name, shapes, rounds)
    return rows


def _rows(name: str, shapes: list[Shape], rounds: int) -> list[Row]:
    scores = [_magnitudes(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    return [_row(f'{name}, {ranked}', pruner, scores, rounds) for ranked, pruner in PRUNERS.items()]


@functools.partial(jax.jit, static_argnums=1)
def _magnitudes(key: jax.Array, shape: Shape) -> jax.Array:
    return jnp.abs(jax.random.normal(key, shape))


def _row(name: str, pruner: Any, scores: list[jax.Array], rounds: int) -> Row:
    masks = jax.jit(functools.partial(_masks, pruner=pruner))
    watch = Stopwatch()
    compiled = masks.lower(scores).compile()
    compiling = watch.lap()
    _check(name, compiled, scores)
    calls: dict[str, Callable[[], Any]] = {
        'ours': functools.partial(compiled, scores),
        'pass': functools.partial(jax.jit(_largest), scores),
    }
    times = interleaved(calls, rounds)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    values = (
        times['ours'].milliseconds,
        ratio(times['ours'], times['pass']),
        temporary / sum(score.size for score in scores),
        temporary / 2**20,
        compiling.seconds,
        compiling.core_seconds,
        compiled.as_text().count(' fusion('),
    )
    return Row(name, values)


def _masks(scores: list[jax.Array], pruner: Any) -> list[jax.Array]:
    return pruner.create_masks(scores, [SPARSITY] * len(scores))


def _largest(scores: list[jax.Array]) -> list[jax.Array]:
    return [jnp.max(score) for score in scores]


def _check(name: str, masks: Callable[..., list[jax.Array]], scores: list[jax.Array]) -> None:
    """Refuses masks that keep more weights than asked for, or fewer."""
    kept = sum(int(jnp.count_nonzero(mask)) for mask in masks(scores))
    wanted = sum(number_kept(score.size) for score in scores)
    # Where all are ranked together, the number is rounded once.
    if abs(kept - wanted) > len(scores):
        raise AssertionError(f'{name}: the masks keep {kept} weights rather than {wanted}')
