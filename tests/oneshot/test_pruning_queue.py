"""Matrices whose statistics take most memory are pruned first, and shared statistics are prepared once."""

import jax.numpy as jnp

from jaxpruner.oneshot import calibrate
from jaxpruner.oneshot.pruning_queue import PruningQueue

PARAMS = {'few': jnp.ones((2, 8)), 'many': jnp.ones((8, 2)), 'beside': jnp.ones((8, 1))}


def apply(params, x):
    x = x @ params['few']
    return x @ params['many'] + x @ params['beside']


def test_what_frees_most_memory_comes_first_and_shared_statistics_are_prepared_once():
    calibration = calibrate(apply, PARAMS, [jnp.ones((3, 2))], 'gram')
    prepared = []

    def prepare(statistics):
        prepared.append(statistics.gram.shape)
        return statistics.gram

    entries = [entry for path in calibration for entry in calibration[path]]
    queue = PruningQueue(entries, prepare)
    taken = [(matrices.where, gram.shape) for matrices, _, gram, _ in queue]
    assert taken == [('beside', (8, 8)), ('many', (8, 8)), ('few', (2, 2))]
    assert prepared == [(8, 8), (2, 2)]
