"""Masks of the largest weights against a sort, numpy's partition, and (on a GPU) `jax.lax.top_k`.

The references are told how many weights are kept, which the library computes itself. `numpy.partition` keeps all
weights that equal the threshold, so it does less work.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiled import temporary_bytes
from benchmarks.report import Row
from benchmarks.timing import IN_PLACE, Timing, bound, in_program, interleaved, joined, ratio
from jaxpruner import mask_calculator, selection

SPARSITY = 0.9
SHAPES = {
    'small': [(1000,), (30, 30)],
    'cpu': [(10**4,), (10**5,), (10**6,), (10**7,), (1000, 1000)],
    'gpu': [(10**4,), (10**5,), (10**6,), (10**7,), (10**8,), (1000, 1000), (10**4, 10**4)],
}
ROUNDS = 30
DRAWS = 3
SECONDS_FOR_REFERENCES = 12
COLUMNS = (
    'milliseconds',
    'passes over the memory',
    'argsort takes times as long',
    'numpy.partition takes times as long',
    'top_k takes times as long',
    'milliseconds inside a program',
    'argsort takes times as long there',
    'temporary bytes per weight',
)
# Up to so many weights a mask takes less time than it takes to hand a program over.
SHORT = 10**5
CALLS = 32


def environment() -> Mapping[str, str]:
    """What a process needs to run programs on the thread that calls them, if this one does not.

    Each call is waited for, so that another thread has nothing to add but the way to it: longer than a short mask.
    """
    return {} if IN_PLACE in os.environ else {IN_PLACE: '1'}


def run(size: str, rounds: int) -> Iterator[Row]:
    """Times masks of normal magnitudes."""
    for dtype in (jnp.float32, jnp.bfloat16):
        for shape in SHAPES[size]:
            yield _row(shape, dtype, rounds)


def _row(shape: tuple[int, ...], dtype: jnp.dtype, rounds: int) -> Row:
    functions = {'ours': by_counting, 'pass': jnp.max, 'argsort': _with_kept(by_argsort, shape)}
    if jax.default_backend() == 'gpu':
        functions['top_k'] = _with_kept(by_top_k, shape)
    draws = []
    for seed in range(DRAWS):  # the number of passes differs from draw to draw
        key = jax.random.key(seed)
        draws.append(_timed(key, shape, dtype, functions, -(-rounds // DRAWS)))
    times, slow, inside = map(_joined_by_name, zip(*draws, strict=True))
    temporary = temporary_bytes(by_counting, jax.ShapeDtypeStruct(shape, dtype))
    values = (
        times['ours'].milliseconds,
        ratio(times['ours'], times['pass']),
        ratio(slow['argsort'], slow['ours']),
        ratio(slow['partition'], slow['ours']),
        ratio(slow['top_k'], slow['ours']) if 'top_k' in slow else None,
        inside['ours'].milliseconds / CALLS if inside else None,
        ratio(inside['argsort'], inside['ours']) if inside else None,
        temporary / math.prod(shape),
    )
    return Row(f'{list(shape)} {dtype.__name__}', values)


def _joined_by_name(draws: tuple[dict[str, Timing], ...]) -> dict[str, Timing]:
    return {name: joined(draw[name] for draw in draws) for name in draws[0]}


def _with_kept(
    reference: Callable[..., jax.Array], shape: tuple[int, ...]
) -> Callable[[jax.Array], jax.Array]:
    return functools.partial(reference, kept=number_kept(math.prod(shape)))


def _timed(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    functions: Mapping[str, Callable],
    rounds: int,
) -> tuple[dict[str, Timing], ...]:
    """Times one draw: beside a pass over the memory, beside the references, and inside a program if it is short."""
    x = jnp.abs(jax.random.normal(key, shape, dtype))
    calls = {name: bound(function, x) for name, function in functions.items()}
    for name in calls.keys() - {'ours', 'pass'}:
        if not jnp.array_equal(calls['ours'](), calls[name]()):
            raise AssertionError(
                f'the mask by {name} is another, for {dtype.__name__}{list(shape)}'
            )
    times = interleaved({name: calls[name] for name in ('ours', 'pass')}, rounds)
    # Hundreds of times slower: apart, and in few rounds.
    references = {name: call for name, call in calls.items() if name != 'pass'}
    references['partition'] = functools.partial(by_partition, np.asarray(x), number_kept(x.size))
    slow = interleaved(references, rounds, SECONDS_FOR_REFERENCES / DRAWS)
    if x.size > SHORT:
        return times, slow, {}
    inside = {name: in_program(CALLS, functions[name], x) for name in ('ours', 'argsort')}
    return times, slow, interleaved(inside, rounds)


def by_counting(x: jax.Array) -> jax.Array:
    """The library's mask."""
    return mask_calculator.topk_mask_calculator(x, SPARSITY)


def number_kept(size: int) -> int:
    """How many of so many weights are kept; known also while a reference is traced."""
    with jax.ensure_compile_time_eval():
        return int(selection.number_to_keep(size, SPARSITY))


def by_argsort(x: jax.Array, kept: int) -> jax.Array:
    """What one would write without the library. A stable sort has equal weights in the order of their indices."""
    last = jnp.argsort(-x.ravel())[kept - 1]
    return _up_to(x, x.ravel()[last], last)


def by_top_k(x: jax.Array, kept: int) -> jax.Array:
    """The same with the selection that JAX has; of equal weights it takes those of lower index, too."""
    values, indices = jax.lax.top_k(x.ravel(), kept)
    return _up_to(x, values[-1], indices[-1])


def by_partition(x: np.ndarray, kept: int) -> np.ndarray:
    """The threshold by numpy's selection, and the mask of what reaches it."""
    position = x.size - kept
    threshold = np.partition(x, position, axis=None)[position]
    return (x >= threshold).astype(np.uint8)


def _up_to(x: jax.Array, threshold: jax.Array, last: jax.Array) -> jax.Array:
    index = jnp.arange(x.size).reshape(x.shape)
    return ((x > threshold) | ((x == threshold) & (index <= last))).astype(jnp.uint8)
