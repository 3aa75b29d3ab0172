"""What block_sparse and unstructured_sparse choose and refuse, and what their plans say."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpruner import sparse, sparsity_schedules
from sparse.training.models import PARAMS, X, made, needs_csr

EVERY_STEP = sparsity_schedules.PeriodicSchedule(1)


def test_the_plan_says_what_becomes_of_each_leaf():
    model = made('blocks', sparsity=0.5, only=None)
    leaves = model.plan.leaves
    names = ['head/kernel', 'layers/bias', 'layers/kernel', 'table', 'up/bias', 'up/kernel']
    assert list(leaves) == names
    assert leaves['up/kernel'].layout.kept == 2
    assert leaves['layers/kernel'].layout.layers == (2,)
    assert 'blocks of 4 x 8 do not divide a matrix of 24 x 3' in leaves['head/kernel'].note
    assert leaves['table'].layout is None
    assert leaves['layers/bias'].kept == 48
    text = re.sub(r'\s+', ' ', str(model.plan))
    assert '3 groups of 2 of 3 blocks 4×8' in text
    assert f'{model.plan.kept:,}' in text


@needs_csr
def test_the_plan_says_how_many_weights_are_kept():
    model = made('weights', sparsity={'head/*': None, '*': 0.95}, only=None)
    weights, _ = model.pack(PARAMS)
    assert model.plan.leaves['layers/kernel'].kept == 58
    assert weights['layers']['kernel']['compressed'].shape == (2, 29)
    assert 'each of 2 24×24' in re.sub(r'\s+', ' ', str(model.plan))
    assert model.plan.leaves['head/kernel'].note == 'it has no sparsity'


def test_convolutions_stay_dense():
    def convolved(params, x):
        x = jax.lax.conv(x, params['conv'], (1, 1), 'SAME')
        return x.mean((2, 3)) @ params['out']

    params = {'conv': jnp.ones((8, 4, 3, 3)), 'out': jnp.ones((8, 16))}
    images = jnp.ones((2, 4, 5, 5))
    model = sparse.block_sparse(convolved, params, images, sparsity=0.5, block=(2, 8))
    assert list(model.layouts) == ['out']
    assert 'convolution' in model.plan.leaves['conv'].note


POLYNOMIAL = sparsity_schedules.PolynomialSchedule(1, 0, 10)
LOW_RANK = {'low_rank': 9, 'only': 'up/kernel', 'sparsity': 0.5}
REFUSED = [
    ({'sparsity': {'up/*': 1.5}}, ValueError, r"sparsity\['up/\*'\].*1\.5"),
    ({'sparsity': 1.0}, ValueError, 'sparsity must be below 1'),
    ({'only': 'upp/kernel'}, ValueError, "sparsity: 'upp/kernel'.*up/kernel"),
    ({'only': ('up/bias', 'up/*')}, ValueError, 'up/bias.*no contraction'),
    ({'algorithm': 'riggle'}, ValueError, "'riggle'.*'rigl'"),
    ({'scheduler': POLYNOMIAL}, ValueError, 'PolynomialSchedule changes the n.*PeriodicSchedule'),
    ({'drop_fraction_fn': lambda step: 2.0}, ValueError, r'between 0 and 1.*2\.0'),
    ({'block': 8}, TypeError, r'block must be .*\(8, 128\).* got 8'),
    ({'block': (64, 64), 'only': None}, ValueError, 'no leaf.*64 x 64'),
    (LOW_RANK, ValueError, "'up/kernel'.*rank 9.*at most 3"),
]


@pytest.mark.parametrize(('settings', 'error', 'words'), REFUSED)
def test_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        made('blocks', **settings)


@needs_csr
def test_products_in_a_short_type_are_refused_in_csr():
    def in_bfloat16(params, x):
        return x.astype(jnp.bfloat16) @ params['w'].astype(jnp.bfloat16)

    with pytest.raises(NotImplementedError, match=r'w cannot.*not for bfloat16; cast'):
        sparse.unstructured_sparse(in_bfloat16, {'w': jnp.ones((12, 4))}, X, sparsity=0.8)


MUON = optax.contrib.muon(1e-3)
OPTIMIZERS = {
    'adafactor': optax.adafactor(1e-3),
    'clip_by_block_rms': optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    'muon inside': optax.MultiSteps(MUON, 2).gradient_transformation(),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizers_that_look_at_more_than_single_weights_are_refused(name):
    model = made('blocks')
    weights, _ = model.pack(PARAMS)
    with pytest.raises(ValueError, match=r'this one .*adamw'):
        model.wrap_optax(OPTIMIZERS[name]).init(weights)
    # Leaves that stay dense may have any.
    labels = {**dict.fromkeys(PARAMS, 'elementwise'), 'head': 'any'}
    tx = optax.multi_transform({'elementwise': optax.adam(1e-3), 'any': OPTIMIZERS[name]}, labels)
    model.wrap_optax(tx).init(weights)


def test_what_cannot_move_is_refused():
    model = made('blocks', algorithm='rigl', scheduler=EVERY_STEP)
    weights, topology = model.pack(PARAMS)
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match='rigl grows by probe_grads'):
        model.update(weights, topology, tx.init(weights), tx=tx, step=0)
    with pytest.raises(ValueError, match='lbfgs'):
        model.wrap_optax(optax.lbfgs()).init(weights)
    with pytest.raises(ValueError, match=r"select='magnitud'.*'magnitude'"):
        model.pack(PARAMS, select='magnitud')
    fraction = {'drop_fraction_fn': lambda step: 0.3 + step / 100}
    growing = made('blocks', algorithm='set', scheduler=EVERY_STEP, **fraction)
    with pytest.raises(ValueError, match=r'drop_fraction_fn\(90\).*1\.2'):
        growing.update(weights, topology, tx.init(weights), tx=tx, step=90)


def test_a_key_is_a_seed():
    first, again, other, by_default = (
        made('blocks', rng_seed=seed).pack(PARAMS)[1]['up/kernel']['positions'].tolist()
        for seed in (jax.random.key(3), jax.random.PRNGKey(3), 4, None)
    )
    assert first == again != other
    assert by_default


def test_blocks_that_do_not_suit_are_said():
    with pytest.warns(UserWarning, match='up/kernel: reach 33% of the inputs: blocks of 8 outputs'):
        model = made('blocks', block=(4, 24), sparsity=0.7, only='up/*')
    assert 'reach 33% of the inputs' in model.plan.leaves['up/kernel'].note
    assert made('blocks', block=(4, 24), sparsity=0.6, only='layers/*', low_rank=1).layouts
    with pytest.warns(UserWarning, match=r'up/kernel: 33% are kept: take blocks of fewer inputs'):
        made('blocks', sparsity=0.8, only='up/*', block=(4, 1))


def test_parameters_of_another_shape_are_refused():
    params = {**PARAMS, 'up': {**PARAMS['up'], 'kernel': jnp.ones((3, 7))}}
    with pytest.raises(
        ValueError, match=r'up/kernel has shape \(3, 7\), and in the model \(12, 24'
    ):
        made('blocks').pack(params)
