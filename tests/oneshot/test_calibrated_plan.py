"""The plan of calibrated pruning says what it then does; the model decides which leaves, and along which axes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers.random_numbers import Normal
from jaxpruner import NByM, tree
from oneshot import model

normal = Normal(5)

PARAMS = {
    'tokens': normal(5, 8),
    'heads': {'query': normal(8, 4, 6), 'bias': normal(4, 6), 'out': normal(4, 6, 8)},
    'mlp': {'kernel': normal(8, 8), 'bias': normal(8), 'normed': normal(8, 8)},
    'old': normal(4, 4),
}
TOKENS = jnp.arange(40) % 5


def apply(params, tokens):
    x, heads, mlp = params['tokens'][tokens], params['heads'], params['mlp']
    x = jnp.einsum('bi,ihd->bhd', x, heads['query']) + heads['bias']
    x = jnp.einsum('bhd,hdo->bo', x, heads['out']) @ mlp['kernel'] + mlp['bias']
    return x @ (mlp['normed'] / jnp.linalg.norm(mlp['normed'], axis=0))


WHY_DENSE = {
    'tokens': r'data look up its rows \(an embedding\)',
    'heads/bias': 'no contraction reads it',
    'mlp/bias': 'the default filter leaves out 1-D leaves',
    'mlp/normed': 'what is contracted at .* is computed from this leaf',
    'old': 'it has no part in what apply_fn returns',
}
AXES = {'heads/query': -3, 'heads/out': (-3, -2), 'mlp/kernel': -2}
MODEL = {'apply_fn': apply, 'batches': [TOKENS]}
pytestmark = pytest.mark.filterwarnings(
    'ignore:old. this leaf has no part', 'ignore:these leaves stay dense'
)


@pytest.mark.parametrize('name', ['Wanda', 'RIA', 'SparseGPT'])
@pytest.mark.parametrize('as_shapes', [False, True])
def test_the_plan_with_a_model_names_leaves_reasons_and_axes(name, as_shapes):
    pruner = getattr(jaxpruner.oneshot, name)(sparsity_type='2:4')
    params = jax.eval_shape(lambda: PARAMS) if as_shapes else PARAMS
    plan = pruner.plan(params, **MODEL)
    assert plan.note == ''
    assert f'{name} prunes 3 of 8 leaves' in str(plan)
    _, masks = pruner.instant_sparsify(PARAMS, **MODEL)
    paths, leaves, treedef = tree.flatten_with_paths(PARAMS)
    for path, mask in zip(paths, tree.leaves_like(treedef, masks), strict=True):
        leaf = plan[path]
        assert leaf.is_pruned == (mask is not None)
        if leaf.is_pruned:
            assert leaf.sparsity_type == NByM(2, 4, AXES[leaf.name])
            assert leaf.kept == mask.sum()
    assert plan.kept == sum(np.size(leaf) for leaf in leaves) - (192 + 192 + 64) // 2


@pytest.mark.parametrize('leaf', WHY_DENSE)
def test_the_plan_with_a_model_says_why_a_leaf_stays_dense(leaf):
    plan = jaxpruner.oneshot.Wanda(sparsity=0.5).plan(PARAMS, **MODEL)
    assert re.match(WHY_DENSE[leaf], plan[leaf].why_dense)
    assert (plan[leaf].kept, plan[leaf].target) == (plan[leaf].size, None)
    assert (plan['mlp/kernel'].target, plan['mlp/kernel'].kept, plan.kept) == (0.5, None, None)


def test_the_plan_without_a_model_says_what_it_does_not_know():
    plan = jaxpruner.oneshot.SparseGPT(sparsity_type='2:4').plan(PARAMS)
    assert plan['heads/bias'].sparsity_type == NByM(2, 4, 'input')
    lines = str(plan).splitlines()
    assert lines[0] == 'SparseGPT prunes up to 7 of 8 leaves'
    assert 'plan(params, apply_fn=…, batches=…)' in ' '.join(lines[1:3])
    assert max(map(len, lines)) <= 80
    assert 'along axis' not in str(plan)
    assert '2:4 along the inputs' in str(plan)
    nothing = jaxpruner.oneshot.Wanda().plan(PARAMS)
    assert (nothing.note, nothing.pruned) == ('', ())


def test_the_plan_of_a_model_that_reads_leaves_in_many_ways_counts_what_masks_keep():
    pruner = jaxpruner.oneshot.Wanda(sparsity_type='2:4')
    plan = pruner.plan(model.PARAMS, apply_fn=model.apply, batches=model.BATCHES)
    _, masks = pruner.instant_sparsify(model.PARAMS, apply_fn=model.apply, batches=model.BATCHES)
    for name, mask in masks.items():
        assert plan[name].is_pruned == (mask is not None)
        kept = model.PARAMS[name].size if mask is None else mask.sum()
        assert plan[name].kept == kept


def test_the_plan_warns_of_a_contradiction_once():
    pruner = jaxpruner.oneshot.Wanda(sparsity=0.6, sparsity_type='2:4')
    with pytest.warns(UserWarning, match='contradicts') as seen:
        pruner.plan(PARAMS, **MODEL)
    words = [str(warning.message) for warning in seen]
    assert [word.split(':')[0] for word in words if 'contradicts' in word] == [
        'heads/out (and 2 more leaves)'
    ]
