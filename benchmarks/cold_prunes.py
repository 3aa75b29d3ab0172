"""Pruning a model for the first time in a process, which compiles, against doing it again; each in fresh processes."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxpruner
from benchmarks.models import TRANSFORMERS, Transformer
from benchmarks.report import Row
from benchmarks.timing import Lap, Stopwatch, Timing, ratio

# Four blocks as wide as GPT-2's, and what takes as long as its calibration: 8192 tokens.
MODELS = {
    'small': TRANSFORMERS['small'],
    'cpu': Transformer(4, 768, heads=12, vocabulary=1024, batch_size=8, sequence=128),
    'gpu': Transformer(4, 768, heads=12, vocabulary=1024, batch_size=8, sequence=128),
}
BATCHES = {'small': 2, 'cpu': 8, 'gpu': 8}
ALGORITHMS = ('wanda', 'sparsegpt')
MOST_PROCESSES = 3
LIMIT = 2.5
_CACHE = 'JAX_COMPILATION_CACHE_DIR'


def rows(size: str, rounds: int) -> list[Row]:
    """The first prune of a process against the second, by algorithm: medians over processes."""
    measured = []
    for algorithm in ALGORITHMS:
        laps = []
        for _ in range(min(rounds, MOST_PROCESSES)):
            laps.append(_laps_in_fresh_process(size, algorithm))
        title = f'{algorithm} of {MODELS[size].blocks} blocks, compiled, against compiled before'
        cold, warm = _timings(laps, 'seconds')
        measured.append(Row(title, (cold.milliseconds, None, None, ratio(cold, warm), LIMIT)))
        # Depends less on what else the machine does.
        cold, warm = _timings(laps, 'core_seconds')
        in_cores = cold.milliseconds, None, None, ratio(cold, warm), None
        measured.append(Row(f'{title}, in core seconds', in_cores))
    return measured


def _timings(laps: Sequence[tuple[Lap, Lap]], field: str) -> tuple[Timing, Timing]:
    """What the first and the second prune took in each process."""
    cold, warm = Timing([]), Timing([])
    for first, second in laps:
        cold.rounds.append(getattr(first, field))
        warm.rounds.append(getattr(second, field))
    return cold, warm


def _laps_in_fresh_process(size: str, algorithm: str) -> tuple[Lap, Lap]:
    environment = {**os.environ, 'JAX_ENABLE_COMPILATION_CACHE': '0'}
    environment.pop(_CACHE, None)
    command = [sys.executable, '-m', 'benchmarks.cold_prunes', size, algorithm]
    printed = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    first, second = json.loads(printed)
    return Lap(*first), Lap(*second)


def _prune_twice(size: str, algorithm: str) -> list[Lap]:
    """What the first and the second prune of this process take."""
    model = MODELS[size]
    params = jax.jit(model.init)()
    draw = np.random.default_rng(0).integers
    shape = (model.batch_size, model.sequence)
    batches: list[Any] = []
    for _ in range(BATCHES[size]):
        tokens = draw(model.vocabulary, size=shape, dtype=np.int32)
        batches.append(jax.device_put(tokens))
    jax.block_until_ready((params, batches))
    prune = jaxpruner.prune  # imports what it needs
    watch = Stopwatch()
    laps = []
    for _ in range(2):
        jax.block_until_ready(
            prune(params, 0.5, algorithm, apply_fn=model.logits, batches=batches, progress=False)
        )
        laps.append(watch.lap())
    return laps


if __name__ == '__main__':
    warnings.simplefilter('ignore')  # how good the masks are is no matter
    print(json.dumps(_prune_twice(*sys.argv[1:])))
