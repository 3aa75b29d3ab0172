"""The Python that the JaxPruner README prints runs as printed."""

import functools

import jax.numpy as jnp
import optax
import pytest

import jaxpruner
from helpers import seed_documents
from jaxpruner import sparsity_distributions, sparsity_schedules

pytestmark = seed_documents.needs_documents


def snippets():
    return seed_documents.python_blocks(
        seed_documents.find('# JaxPruner: a research library', '```python')
    )


@pytest.fixture
def names():
    """What the snippets take as given."""
    config = {
        'scheduler': sparsity_schedules.OneShotSchedule(target_step=10),
        'sparsity_distribution_fn': functools.partial(sparsity_distributions.uniform, sparsity=0.5),
    }
    params = {'kernel': jnp.arange(1.0, 33.0).reshape(8, 4), 'bias': jnp.ones(4)}
    return {
        'jaxpruner': jaxpruner,
        'config': config,
        '_existing_code': lambda: (optax.adam(0.1), params),
    }


def test_there_are_two_snippets():
    assert ['wrap_optax' in snippet for snippet in snippets()] == [True, False]
    assert ['is_packed=True' in snippet for snippet in snippets()] == [False, True]


@pytest.mark.parametrize('number', [0, 1])
def test_each_runs_as_printed(names, number):
    exec(snippets()[number], names)


def test_two_lines_prune(names):
    exec(snippets()[0], names)
    tx, params, pruner = names['tx'], names['params'], names['pruner']
    state = tx.init(params)
    assert state.masks['kernel'].shape == (8, 4)
    assert state.masks['bias'] is None
    pruned, _ = pruner.instant_sparsify(params)
    assert int((pruned['kernel'] == 0).sum()) == 16


def test_the_second_snippet_packs_masks(names):
    exec(snippets()[1], names)
    exec('tx, params = _existing_code()\ntx = pruner.wrap_optax(tx)', names)
    with pytest.warns(
        UserWarning, match='MagnitudePruning prunes no leaf of 2'
    ):  # there is no sparsity in it
        masks = names['tx'].init(names['params']).masks
    assert (masks['kernel'].shape, masks['kernel'].dtype) == ((1, 4), jnp.uint8)
