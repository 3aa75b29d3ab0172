"""Training goes on from an orbax checkpoint as if nothing had happened.

Of the all-pairs cover those cases, in order, that show a new optimizer, or a new pair of packing and algorithm or
front-end: the kinds of nodes that a checkpoint holds. What the masks mean is nothing to it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from contract import cover, tables, training

pytestmark = pytest.mark.filterwarnings(
    'error',
    # orbax says so whenever it restores without a target, which is a use to be tested.
    'ignore:.*Populating sharding info from sharding file:UserWarning',
)


def shown(case):
    return {case.optimizer, (case.algorithm, case.packed), (case.front_end, case.packed)}


CASES = cover.each_once(tables.COVER, shown)
PARAMETERS = [
    pytest.param(c, id=str(c), marks=() if c.algorithm == 'magnitude' else pytest.mark.slow)
    for c in CASES
]
HALF = training.STEPS // 2


@pytest.mark.parametrize('case', PARAMETERS)
def test_continues_from_a_checkpoint(case, tmp_path):
    trained = training.trained(case)
    middle = trained.history[HALF]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'middle', middle)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / 'middle', jax.eval_shape(lambda tree: tree, middle)
        )
        untyped = checkpointer.restore(tmp_path / 'middle')
    training.assert_same(restored, middle)
    check_arrays(untyped, middle)
    # orbax ties arrays to their device, for which jit would compile the step once more.
    free = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), restored)
    continued = training.run(trained.setup.step, free, training.batches()[HALF:])
    for state, uninterrupted in zip(continued, trained.history[HALF:], strict=True):
        training.assert_same(state, uninterrupted)


def check_arrays(untyped, tree):
    """Without a target orbax restores dicts and lists; the arrays in them, by name, are those that were saved."""
    found, saved = by_plain_name(untyped), by_plain_name(tree)
    assert found.keys() == saved.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, saved[name], strict=True)


def by_plain_name(tree):
    """Leaves by path, in which an attribute, a key and an index read alike."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    names = ('/'.join(re.findall(r"[^\[\]'.]+", jax.tree_util.keystr(path))) for path, _ in entries)
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, entries, strict=True)}
