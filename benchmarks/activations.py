"""Activation pruning against a ReLU, one pass over the memory, and pruning by sorting each example."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.report import Row
from benchmarks.timing import bound, interleaved, ratio
from jaxpruner import activations

SHAPES = {
    'small': [(4, 8, 8, 4)],
    'cpu': [(128, 28, 28, 32), (128, 4096)],
    'gpu': [(128, 28, 28, 32), (512, 56, 56, 64), (4096, 4096)],
}
ROUNDS = 30
SECONDS_FOR_SORTING = 12
COLUMNS = ('milliseconds', 'times a ReLU', 'passes over the memory', 'sorting takes times as long')


def run(size: str, rounds: int) -> list[Row]:
    """Times each function on normal activations and on those that a ReLU has made half zero."""
    rows = []
    for shape in SHAPES[size]:
        x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
        for origin, values in (('normal', x), ('after a ReLU', jax.nn.relu(x))):
            rows += _rows(f'{list(shape)} {origin}', values, rounds)
    return rows


def _rows(title: str, x: jax.Array, rounds: int) -> list[Row]:
    pruned, by_sorting = {}, {}
    for density in (0.9, 0.5):
        name = f'unstructured, density {density}'
        pruned[name] = _bound(activations.prune_act_unstruct, x, density)
        by_sorting[f'{name}, by sorting'] = _bound(_by_sorting, x, density)
    pruned['2:4'] = _bound(activations.prune_act_struct, x, (2, 4))
    references = {
        'relu': bound(jax.nn.relu, x),
        'pass': bound(lambda x: jnp.max(x, axis=tuple(range(1, x.ndim))), x),
    }
    times = interleaved({**references, **pruned}, rounds)
    # Hundreds of times slower: apart, and in few rounds.
    slow = interleaved({**by_sorting, **pruned}, rounds, SECONDS_FOR_SORTING)
    rows = []
    for name in pruned:
        sorting = slow.get(f'{name}, by sorting')
        values = (
            times[name].milliseconds,
            ratio(times[name], times['relu']),
            ratio(times[name], times['pass']),
            None if sorting is None else ratio(sorting, slow[name]),
        )
        rows.append(Row(f'{title}: {name}', values))
    return rows


def _bound(prune: Any, x: jax.Array, rate: Any) -> Any:
    return bound(lambda x: prune(x, rate), x)


def _by_sorting(x: jax.Array, density: float) -> jax.Array:
    """What one would write without the library: each example's threshold from a sort."""
    magnitudes = jnp.abs(x.reshape(len(x), -1))
    kept = round(density * magnitudes.shape[1])
    threshold = jnp.sort(magnitudes, axis=1)[:, -kept][:, None]
    return jnp.where(magnitudes >= threshold, x.reshape(len(x), -1), 0).reshape(x.shape)
