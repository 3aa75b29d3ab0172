"""Calibration against the forward pass, SparseGPT on one layer, the memory of pruning a deep model, and compiling.

Calibration asks for a batch when it is done with the one before: its time is what passes between. The forward pass of
the same batch is timed in between, so that drift hits both.
"""

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cold_prunes
from benchmarks.compiled import live_bytes, watched
from benchmarks.models import TRANSFORMERS, Transformer
from benchmarks.report import Row
from benchmarks.selection import environment as environment
from benchmarks.timing import Timing, bound, interleaved, ratio
from jaxpruner import oneshot, sparsity_distributions
from jaxpruner.oneshot import leaves, sparsegpt
from jaxpruner.oneshot.calibrate import SequentialCalibration
from jaxpruner.sparsity_types import NByM, Unstructured

ROUNDS = 30
SECONDS = 60
COLUMNS = ('milliseconds', 'limit in milliseconds', 'MiB', 'times the reference', 'limit of that')

# On a CPU the model of examples/oneshot_shakespeare.py.
CALIBRATED = {
    'small': TRANSFORMERS['small'],
    'cpu': Transformer(4, 160, heads=4, vocabulary=65, batch_size=16, sequence=128),
    'gpu': TRANSFORMERS['gpu'],
}
KINDS = {'second_moment': ('second moments', 1.4), 'gram': ('Gram matrices', 4.0)}
LAYERS = {'small': 32, 'cpu': 2048, 'gpu': 8192}
MOST_MILLISECONDS = 1500.0
DEEP = {
    'small': Transformer(2, 16, heads=2, vocabulary=32, batch_size=2, sequence=8, scanned=True),
    'cpu': Transformer(24, 256, heads=4, vocabulary=64, batch_size=2, sequence=64, scanned=True),
    'gpu': Transformer(
        24, 1024, heads=16, vocabulary=1024, batch_size=2, sequence=256, scanned=True
    ),
}
MOST_MEMORY = 1.1
PRUNED = 'blocks/*/kernel'
COMPILED = [(sparsegpt, 'prune_by_sparsegpt')]


def run(size: str, rounds: int) -> Iterator[Row]:
    """Times calibration and SparseGPT, then counts memory, then prunes in fresh processes."""
    yield from _calibration(CALIBRATED[size], rounds)
    yield from _sparsegpt(LAYERS[size], rounds)
    yield from _memory(DEEP[size])
    yield from cold_prunes.rows(size, rounds)


def _calibration(model: Transformer, rounds: int) -> list[Row]:
    params, tokens = jax.jit(model.init)(), model.batch().inputs
    forward = bound(model.logits, params, tokens)
    rows = []
    for kind, (name, limit) in KINDS.items():
        taken, reference = Timing([]), Timing([])
        batches = _timed_batches(tokens, forward, rounds, taken, reference)
        oneshot.calibrate(model.logits, params, batches, kind)
        rows.append(
            Row(
                f'{name} against the forward pass', (*_times(taken), ratio(taken, reference), limit)
            )
        )
    return rows


def _timed_batches(
    batch: Any, forward: Callable[[], Any], rounds: int, taken: Timing, reference: Timing
) -> Iterator[Any]:
    """The batch again and again; with the first one calibration is compiled."""
    for number in range(rounds + 1):
        began = time.perf_counter()
        yield batch
        jax.block_until_ready(jnp.zeros(()))  # waits for what was handed to the device before
        calibrated = time.perf_counter()
        jax.block_until_ready(forward())
        if number:
            taken.rounds.append(calibrated - began)
            reference.rounds.append(time.perf_counter() - calibrated)


def _sparsegpt(width: int, rounds: int) -> list[Row]:
    """The reference is what no implementation can do without: a decomposition, and a pass over the weights."""
    weights, samples = (
        jax.random.normal(jax.random.key(i), (n, width)) for i, n in enumerate((width, 2 * width))
    )
    gram = samples.T @ samples
    damped, dense = np.array(gram), np.asarray(weights)
    damped[np.diag_indices(width)] *= 1.01
    types = {'50 %': Unstructured(), '2:4': NByM(2, 4)}
    calls = {
        name: bound(
            functools.partial(oneshot.prune_by_sparsegpt, sparsity=0.5, sparsity_type=kind),
            weights,
            gram,
        )
        for name, kind in types.items()
    }
    reference: Any = lambda: np.linalg.cholesky(damped) @ dense  # noqa: E731
    times = interleaved({**calls, 'reference': reference}, rounds, SECONDS)
    return [
        Row(
            f'SparseGPT, {list(weights.shape)}, {name}, against a Cholesky decomposition and a product in NumPy',
            (
                times[name].milliseconds,
                MOST_MILLISECONDS,
                None,
                ratio(times[name], times['reference']),
                None,
            ),
        )
        for name in types
    ]


def _times(timing: Timing) -> tuple[float, None, None]:
    return timing.milliseconds, None, None


def _memory(model: Transformer) -> list[Row]:
    """What there has to be at the same time is the parameters and the Gram matrices, of all blocks or of one."""
    tokens = model.batch().inputs

    def calibrate(params: Any) -> None:
        oneshot.calibrate(model.logits, params, [tokens], 'gram', only=PRUNED)

    def calibrate_in_turn(params: Any) -> None:
        traced = leaves.trace_model(model.logits, params, [tokens])
        matrices = leaves.follow_named_leaves(traced.graph, PRUNED).all_matrices
        run = SequentialCalibration(traced, matrices, 'gram')
        for number in range(len(run.blocks)):
            run.take(number, params)

    def prune(params: Any, in_turn: bool = False) -> None:
        pruner = oneshot.SparseGPT(
            sparsity_distribution_fn=functools.partial(
                sparsity_distributions.uniform, sparsity=0.5
            ),
            sparsity_type={PRUNED: 'unstructured', '*': None},
            sequential=in_turn,
        )
        pruner.instant_sparsify(params, apply_fn=model.logits, batches=[tokens])

    calls: dict[str, tuple[Callable[[Any], None], int, float | None]] = {
        'calibrating': (calibrate, model.blocks, MOST_MEMORY),
        # There are new weights and masks, too.
        'calibrating and pruning': (prune, model.blocks, None),
        'calibrating one after another': (calibrate_in_turn, 1, MOST_MEMORY),
        'calibrating and pruning one after another': (
            functools.partial(prune, in_turn=True),
            1,
            None,
        ),
    }
    rows = []
    for name, (call, blocks, limit) in calls.items():
        params = jax.jit(model.init)()
        needed = _bytes(params) + blocks * _gram_bytes(model)
        others = live_bytes() - _bytes(params)
        with watched(*COMPILED) as watch, warnings.catch_warnings():
            warnings.filterwarnings(
                'ignore', '.*samples are fewer', UserWarning
            )  # how good the masks are is no matter
            call(params)
        taken = watch.bytes - others
        title = f'{name} {model.blocks} scanned blocks, against parameters and Gram matrices of {blocks}'
        rows.append(Row(title, (None, None, taken / 2**20, taken / needed, limit)))
    return rows


def _gram_bytes(model: Transformer) -> int:
    """Of a block: queries, keys and values share their inputs; the MLP's second layer has four times as many."""
    return 4 * (3 + 4**2) * model.width**2


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
