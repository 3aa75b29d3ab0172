"""Every algorithm keeps its promises with every optimizer, front-end, sparsity type and way to store masks.

The cases are an all-pairs cover: each two values of two dimensions meet in one case, unless an algorithm refuses one of
them, which `test_refused_*` assert instead.
"""

import dataclasses
import itertools

import numpy as np
import optax
import pytest

import jaxpruner
from contract import checks, cover, expected, front_ends, tables, training

pytestmark = pytest.mark.filterwarnings('error')

CASES = [
    pytest.param(c, id=str(c), marks=() if c in tables.QUICK else pytest.mark.slow)
    for c in tables.COVER
]

PLAIN = tables.Case('magnitude', True, 'adam', 'dict', 'unstructured', 'uniform')


def test_table_names_every_algorithm():
    assert tables.ALGORITHMS.keys() == set(jaxpruner.all_algorithm_names())


def test_cover_meets_every_allowed_pair():
    combinations = (
        dict(zip(tables.DIMENSIONS, values, strict=True))
        for values in itertools.product(*tables.DIMENSIONS.values())
    )
    possible = {
        pair
        for combination in combinations
        if tables.is_allowed(combination)
        for pair in cover.pairs_of(combination)
    }
    covered = [dataclasses.asdict(case) for case in tables.COVER]
    assert all(tables.is_allowed(combination) for combination in covered)
    assert set().union(*map(cover.pairs_of, covered)) == possible


@pytest.mark.parametrize('case', CASES)
def test_contract(case):
    trained = training.trained(case)
    params, opt_state = trained.history[-1]
    assert trained.compilations == 1
    assert all(np.isfinite(leaf).all() for leaf in training.by_path(params).values())
    for state in trained.history:
        checks.check_zeros(case, *state)
    checks.check_storage(case, params, opt_state)
    checks.check_counts(case, trained.setup.updater, params, opt_state)
    if tables.ALGORITHMS[case.algorithm].starts_sparse:
        checks.check_regrowth(case, trained.history)
    training.assert_same(trained.setup.updater.post_gradient_update(params, opt_state), params)


def refused(names):
    """Each (algorithm, name) of which the table says that the algorithm refuses it, and the reason."""
    return [
        pytest.param(algorithm, name, reason, id=f'{algorithm}-{name}')
        for algorithm, rules in tables.ALGORITHMS.items()
        for name, reason in rules.refuses.items()
        if name in names
    ]


@pytest.mark.parametrize(('algorithm', 'sparsity_type', 'reason'), refused(expected.MASK_CHECKS))
def test_refused_sparsity_type(algorithm, sparsity_type, reason):
    with pytest.raises(ValueError, match=reason):
        training.set_up(
            dataclasses.replace(PLAIN, algorithm=algorithm, sparsity_type=sparsity_type)
        )


@pytest.mark.parametrize(('algorithm', 'optimizer', 'reason'), refused(tables.OPTIMIZERS))
def test_refused_optimizer(algorithm, optimizer, reason):
    case = dataclasses.replace(PLAIN, algorithm=algorithm, optimizer=optimizer, front_end='nnx')
    with pytest.raises(ValueError, match=reason):
        training.set_up(case).start(seed=0)


def test_no_prune_trains_as_the_optimizer_alone():
    case = dataclasses.replace(PLAIN, algorithm='no_prune', sparsity_type=tables.DENSE)
    pruned = training.trained(case)
    tx, (_, apply) = optax.adam(1e-2), front_ends.make(case.front_end, 0)
    step = training.compiled(case, training.make_step(pruned.setup.updater, tx, apply))
    params, _ = pruned.history[0]
    alone = training.run(step, (params, tx.init(params)), training.batches())
    training.assert_same(pruned.history[-1][0], alone[-1][0])
