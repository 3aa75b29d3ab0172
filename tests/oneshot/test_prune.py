"""`prune` and `plan`: which leaves, along which axes, and no call that prunes something else and says nothing."""

import ast
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import NByM, tree
from jaxpruner.oneshot import SparseGPT, Wanda, calibrate
from jaxpruner.sparsity_types import Block
from oneshot import references
from oneshot.model import normal
from uses.table import conv

PARAMS = {'up': normal(8, 16), 'down': normal(16, 8), 'bias': normal(8)}
X = normal(32, 8)
EACH_WAY = [('ria', {'sequential': True}), ('sparsegpt', {})]


def mlp(params, x):
    return jnp.tanh(x @ params['up']) @ params['down'] + params['bias']


MODEL = {'apply_fn': mlp, 'batches': [X]}


def groups_along(mask, axis, n=2, m=4):
    """Whether of each m consecutive weights along an axis n are kept."""
    moved = np.moveaxis(np.asarray(mask), axis, -1)
    return bool((moved.reshape(-1, m).sum(-1) == n).all())


# Leaves that have no part, or that cannot be followed.


@pytest.mark.parametrize('algorithm', ['wanda', 'magnitude'])
def test_a_model_that_ignores_its_params_is_refused(algorithm):
    given = {'apply_fn': lambda params, x: mlp(PARAMS, x), 'batches': [X]}
    with pytest.raises(ValueError, match=r'does not depend on .*\(down, up\).*lambda params, x: m'):
        jaxpruner.prune(PARAMS, 0.5, algorithm, **given)


def normed(params, x):
    """Weight norm: what is contracted is computed from the leaf."""
    return mlp(params | {'up': params['up'] / jnp.linalg.norm(params['up'], axis=0)}, x)


@pytest.mark.parametrize(('algorithm', 'settings'), EACH_WAY)
def test_leaves_that_have_no_part_or_are_computed_with_stay_dense_with_one_warning(
    algorithm, settings
):
    params = PARAMS | {'old': normal(4, 4)}
    with pytest.warns(UserWarning, match=r"old: it has no part .*\{'old': None") as seen:
        _, masks = jaxpruner.prune(params, 0.5, algorithm, **MODEL, **settings)
    assert [warning.filename for warning in seen] == [__file__]
    assert (masks['old'], masks['up'].sum()) == (None, 64)
    with pytest.warns(UserWarning, match=r"up: what is contracted .*\{'up': None, '\*'") as seen:
        _, masks = jaxpruner.prune(PARAMS, 0.5, algorithm, apply_fn=normed, batches=[X], **settings)
    assert (len(seen), masks['up'], masks['down'].sum()) == (1, None, 64)
    dense = {'sparsity_type': {'old': None, '*': 'unstructured'}}
    _, masks = jaxpruner.prune(params, 0.5, algorithm, **MODEL, **settings, **dense)
    assert masks['old'] is None


TIED = {'wte': normal(12, 8), 'wpe': normal(4, 8), 'w': normal(8, 8)}
TOKENS = jnp.arange(32).reshape(8, 4) % 12


def tied(params, tokens):
    x = params['wte'][tokens] + params['wpe']
    return jnp.tanh(x @ params['w']) @ params['wte'].T


@pytest.mark.parametrize(('algorithm', 'settings'), [*EACH_WAY, ('magnitude', {})])
def test_lookups_are_left_alone_unless_they_are_named(algorithm, settings):
    given = {'algorithm': algorithm, 'apply_fn': tied, 'batches': [TOKENS]} | settings
    _, masks = jaxpruner.prune(TIED, 0.5, **given)
    assert (masks['wte'], masks['wpe']) == (None, None)
    assert masks['w'].sum() == 32
    by_type = {'wt*': 'unstructured', '*': None}
    for named in ({'custom_sparsity_map': {'wte': 0.5}}, {'sparsity_type': by_type}):
        _, masks = jaxpruner.prune(TIED, 0.5, **given, **named)
        assert masks['wte'].sum() == 48
    _, masks = jaxpruner.prune(TIED, {'wpe': 0.25, 'w': 0.5}, **given)
    assert (masks['wpe'] is None) == (algorithm != 'magnitude')  # others have no statistics of it
    _, masks = jaxpruner.prune(TIED, {'wte': 0.5, '*': 0.5}, **given, sparsity_type='2:4')
    assert masks['wpe'] is None
    assert groups_along(masks['wte'], 1)  # as the product that it is tied to reads it


EXPERTS = {'experts': normal(4, 8, 6).at[3, 0, 0].set(3.2)}


def scanned(params, x):
    """The experts are layers, of which the last gets nothing."""
    layers = params['experts'], jnp.array([1.0, 1.0, 1.0, 0.0])
    return jax.lax.scan(lambda x, layer: (x, (x * layer[1]) @ layer[0]), x, layers)[1]


@pytest.mark.parametrize('settings', [{'sequential': True}, {'algorithm': 'sparsegpt'}])
def test_matrices_whose_inputs_never_occur_are_pruned_as_if_inputs_were_alike(settings):
    given = {'algorithm': 'wanda', 'apply_fn': scanned, 'batches': [normal(64, 8)]} | settings
    with pytest.warns(UserWarning, match=': experts, (matrix|layer) 3;') as seen:
        pruned, masks = jaxpruner.prune(EXPERTS, **given, sparsity_type='2:4')
    assert len(seen) == 1
    expected = references.keep_n_of_m(np.abs(EXPERTS['experts'][3]), 2, 4)
    np.testing.assert_array_equal(masks['experts'][3], expected)
    np.testing.assert_allclose(pruned['experts'][3], EXPERTS['experts'][3] * expected, rtol=1e-6)


def test_more_damping_is_warned_of_once():
    given = {'apply_fn': lambda params, x: x @ params['up'], 'batches': [jnp.ones((32, 8))]}
    with pytest.warns(UserWarning, match=r'decomposed with damping 0.0: up;') as seen:
        jaxpruner.prune({'up': PARAMS['up']}, 0.5, 'sparsegpt', **given, damping=0.0)
    assert len(seen) == 1


def test_sparsegpt_revives_no_weight_if_zeros_are_kept():
    params = PARAMS | {'up': jnp.where(jnp.abs(PARAMS['up']) < 0.7, 0, PARAMS['up'])}
    for keep_zeros in (True, False):
        settings = {'sparsity_type': '2:4', 'keep_zeros': keep_zeros}
        pruned, _ = jaxpruner.prune(params, 0.5, 'sparsegpt', **settings, **MODEL)
        assert ((pruned['up'] != 0) & (params['up'] == 0)).any() != keep_zeros


# Groups of N:M.


@pytest.mark.parametrize('algorithm', ['magnitude', 'wanda'])
def test_groups_lie_along_the_inputs_of_a_model_that_is_given(algorithm):
    params = {'up': normal(8, 12), 'down': normal(8, 12)}  # inputs first, then outputs first
    given = {'apply_fn': lambda params, x: jnp.tanh(x @ params['up']) @ params['down'].T}
    for setting in ('2:4', NByM(2, 4, axis='input'), {'up': '2:4', '*': NByM(2, 4)}):
        settings = given | {'batches': [X], 'sparsity_type': setting}
        _, masks = jaxpruner.prune(params, algorithm=algorithm, **settings)
        assert groups_along(masks['up'], 0)
        assert groups_along(masks['down'], 1)


def heads(params, x):
    """Attention's kernels: a group of four may hold weights of two heads, of which each has six."""
    x = jnp.einsum('bi,ihd->bhd', x, params['query']) + params['bias']
    return jnp.einsum('bhd,hdo->bo', x, params['out'])


HEADS = {'query': normal(8, 4, 6), 'bias': normal(4, 6), 'out': normal(4, 6, 8)}


@pytest.mark.parametrize('algorithm', ['magnitude', 'wanda'])
def test_a_sparsity_that_contradicts_n_by_m_is_warned_of_once(algorithm):
    given = {'apply_fn': heads, 'batches': [X], 'sparsity_type': '2:4'}
    with pytest.warns(
        UserWarning, match=r'of out \(0.6, where 2:4 .*, query .*contradicts'
    ) as seen:
        _, masks = jaxpruner.prune(HEADS, 0.6, algorithm, **given)
    assert (len(seen), masks['bias']) == (1, None)
    if (
        algorithm == 'wanda'
    ):  # the others prune a leaf that is named even if no contraction reads it
        jaxpruner.prune(HEADS, {'bias': 0.6, '*': 0.5}, algorithm, **given)  # warnings are errors


# A stem, a depthwise convolution, and layers of 8 and 18 inputs.
SHAPES = {'stem': (3, 3, 3, 8), 'depthwise': (3, 3, 1, 8), 'wide': (8, 18), 'out': (18, 4)}
MIXED = {name: normal(*shape) for name, shape in SHAPES.items()}
REFUSED = ['stem', 'depthwise', 'out']


def cnn(params, x):
    x = conv(conv(x, params['stem']), params['depthwise'], feature_group_count=8)
    return jax.nn.relu(x.mean((1, 2)) @ params['wide']) @ params['out']


RULES = [('magnitude', '2:4'), ('wanda', {'wide': '1:4', 'out': '2:4', '*': 'nm_2,4'})]


@pytest.mark.filterwarnings('ignore:samples are fewer')
@pytest.mark.parametrize(('algorithm', 'rules'), RULES)
def test_one_error_names_all_leaves_that_cannot_take_n_by_m_and_its_setting_works(algorithm, rules):
    given = {'algorithm': algorithm, 'apply_fn': cnn, 'batches': [normal(2, 6, 6, 3)]}
    with pytest.raises(ValueError, match='leave them dense') as caught:
        jaxpruner.prune(MIXED, sparsity_type=rules, **given)
    reasons, _, setting = str(caught.value).partition('sparsity_type=')
    setting = ast.literal_eval(setting.replace('…', "'2:4'"))
    assert all(f'{name}: ' in reasons for name in REFUSED)
    assert setting == dict.fromkeys(REFUSED) | {'*': '2:4'}
    _, masks = jaxpruner.prune(MIXED, sparsity_type=setting, **given)
    assert {name for name, mask in masks.items() if mask is None} == set(REFUSED)


# Sparsities.


def kept(*arguments, **settings):
    _, masks = jaxpruner.prune(PARAMS, *arguments, **settings)
    return {name: int(mask.sum()) for name, mask in masks.items() if mask is not None}


# A leaf without inputs.
EMPTY = {'apply_fn': lambda params, x: mlp(params, x + x[:, :0] @ params['none']), 'batches': [X]}


def test_sparsities_by_name_and_by_type():
    assert kept({'up': 0.25, 'd*': 0.5}) == {'up': 96, 'down': 64}
    assert kept({'up': 0.25, 'd*': 0.5}, 'wanda', **MODEL) == {'up': 96, 'down': 64}
    _, masks = jaxpruner.prune(PARAMS | {'none': jnp.ones((0, 8))}, 0.5, 'sparsegpt', **EMPTY)
    assert (masks['none'], masks['up'].sum()) == (None, 64)
    assert kept({'up': None, '*': 0.5}) == {'down': 64}
    assert kept({'bias': 0.5}) == {'bias': 4}
    assert kept({'*': 0.5}, filter_fn=lambda path, leaf: leaf.ndim == 1) == {'bias': 4}
    assert kept(sparsity_type='nm_1,4,-1') == {'up': 32, 'down': 32}
    for algorithm in ('magnitude', 'sparsegpt'):  # N:M needs no sparsity
        given = {'algorithm': algorithm, 'sparsity_type': {'up': '1:4', '*': '2:4'}}
        assert kept(**given, **MODEL) == {'up': 32, 'down': 64}
    n_by_m = {'sparsity_type': NByM(2, 4, axis=0), 'custom_sparsity_map': {'up*': None}}
    assert kept(**n_by_m) == {'down': 64}


LOSS = {'loss_fn': lambda params, x: jnp.sum(mlp(params, x) ** 2), 'batches': [X]}
# A call that prunes nothing, and what its warning says of the reason.
PRUNES_NOTHING = [
    (lambda: jaxpruner.prune(PARAMS, 0.0), 'down, up: its target is 0'),
    (lambda: jaxpruner.prune({'s': normal(8)}, 0.5), 'default filter leaves out 1-D'),
    (lambda: jaxpruner.prune({}, 0.5), 'there are no parameters'),
    (lambda: jaxpruner.prune(PARAMS, 0.0, 'wanda', **MODEL), 'its target is 0'),
    (lambda: jaxpruner.prune(PARAMS, 0.0, 'snip', **LOSS), 'its target is 0'),
]


@pytest.mark.parametrize(('call', 'reason'), PRUNES_NOTHING)
def test_what_prunes_nothing_says_so_once(call, reason):
    with pytest.warns(UserWarning, match=f'prunes no.*{reason}') as seen:
        call()
    assert [warning.filename for warning in seen] == [__file__]


# Batches.


def two_inputs(params, x, y):
    return mlp(params, x + y)


def loss(params, x, y):
    return jnp.mean(two_inputs(params, x, y) ** 2)


class Transition(NamedTuple):
    observation: jax.Array
    reward: jax.Array


def test_a_named_tuple_or_a_list_is_one_input():
    def masks_of(loss_fn, batch):
        return jaxpruner.prune(PARAMS, 0.5, 'snip', loss_fn=loss_fn, batches=[batch])[1]

    expected = masks_of(loss, (X, X))
    for batch in (Transition(X, X), [X, X]):
        found = masks_of(lambda params, batch: loss(params, *batch), batch)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def sequential(blocks=None, **given):
    pruner = Wanda(sparsity=0.5, sequential=True, blocks=blocks)
    pruner.instant_sparsify(PARAMS, **(MODEL | given))


def snip(batches):
    jaxpruner.prune(PARAMS, 0.5, 'snip', loss_fn=loss, batches=batches)


def wanda(params=PARAMS, **given):
    jaxpruner.prune(params, 0.5, 'wanda', **(MODEL | given))


NAN, INF = {'up': PARAMS['up'] * jnp.nan}, [X.at[0, 0].set(jnp.inf)]
ODD = {'w': jnp.ones((6, 4))}
needs_train = lambda params, x, *, train: mlp(params, x)  # noqa: E731
first = {'apply_fn': lambda params, x: x @ params['up'], 'batches': [X]}
odd = {'apply_fn': lambda params, x: x @ params['w'], 'batches': [normal(9, 6)]}
BAD = [
    (lambda: jaxpruner.prune(PARAMS, {'upp': 0.5}), "sparsity: 'upp' matches no parameter"),
    (lambda: jaxpruner.prune(PARAMS, {'up': 1.5}), r"sparsity\['up'\] must lie in \[0, 1\]"),
    (lambda: jaxpruner.prune(PARAMS, 0.5, 'wanda'), 'Wanda: .* both apply_fn=… and batches=…'),
    (lambda: jaxpruner.plan(PARAMS, 0.5, apply_fn=mlp), 'MagnitudePruning: .* batches=…'),
    (lambda: jaxpruner.prune(PARAMS, 0.5, apply_fn=mlp, batches=3), 'iterable of batches.* got 3'),
    (lambda: wanda(ODD, **odd, sparsity_type='2:4'), 'w: its 6 inputs do not divide into groups'),
    (lambda: wanda(batches=[]), 'batches are empty'),
    (lambda: wanda(apply_fn=two_inputs), r'of shapes \(32, 8\): missing .* plain tuple'),
    (lambda: snip([Transition(X, X)]), r"loss_fn .* Transition.*: missing .*batch\['x'\]\)"),
    (
        lambda: SparseGPT().instant_sparsify(PARAMS, calibration=calibrate(mlp, PARAMS, [X])),
        "hold no Gram matrix; calibrate with kind='gram'",
    ),
    (lambda: wanda(batches=INF), 'up: its inputs are not finite; look for NaN or inf'),
    (lambda: wanda(apply_fn=needs_train), r"'train'.* functools\.partial\(apply_fn, train"),
    (lambda: jaxpruner.prune(NAN, 0.5, 'sparsegpt', **first), 'up: its new weights are not finite'),
    (lambda: Wanda(sparsity_type=Block((2, 2))), 'calibrated pruning is .* got Block'),
    (lambda: Wanda(sparsity_type='2:4', owl=True), 'owl=True chooses sparsities, which NByM'),
    (lambda: Wanda(blocks=['a']), 'blocks are for sequential=True, or for owl=True per block'),
    (lambda: SparseGPT().wrap_optax(None), r'SparseGPT prunes once .* FixedMask\(masks\)'),
    (lambda: sequential(blocks=['up', ['c']]), "blocks: 'c' matches no parameter"),
    (lambda: sequential(calibration={}), 'sequential=True takes statistics as it goes'),
    (lambda: Wanda().instant_sparsify(PARAMS, calibration={}, weights=len), 'weighed already'),
    (lambda: jaxpruner.prune(PARAMS, 0.5, **MODEL, weights=len), 'does not take weights'),
    (lambda: sequential(batches=[X, X[:20]]), 'sequential=True takes batches of one shape'),
]


@pytest.mark.filterwarnings('ignore:.*Gram matrices could not be decomposed')
@pytest.mark.parametrize(('call', 'message'), BAD)
def test_bad_calls(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize('offset', [0, 1])
def test_what_an_einsum_scales_by_is_no_weight_matrix(offset):
    params = {'scale': normal(4, 8), 'kernel': normal(8, 6)}

    def apply_fn(params, x):
        return jnp.einsum('bhk,hk->bhk', x, params['scale'] + offset) @ params['kernel']

    _, masks = jaxpruner.prune(params, 0.5, 'wanda', apply_fn=apply_fn, batches=[normal(5, 4, 8)])
    assert masks['scale'] is None
    assert masks['kernel'].sum() == 24


# Plans.

PLANNED = {
    'tokens': normal(5, 8),
    'heads': {'query': normal(8, 4, 6), 'bias': normal(4, 6), 'out': normal(4, 6, 8)},
    'mlp': {'kernel': normal(8, 8), 'bias': normal(8), 'normed': normal(8, 8)},
    'old': normal(4, 4),
}


def apply(params, tokens):
    x, mlp = heads(params['heads'], params['tokens'][tokens]), params['mlp']
    x = x @ mlp['kernel'] + mlp['bias']
    return x @ (mlp['normed'] / jnp.linalg.norm(mlp['normed'], axis=0))


WHY_DENSE = {
    'tokens': r'data look up its rows \(an embedding\)',
    'heads/bias': 'no contraction reads it',
    'mlp/bias': 'the default filter leaves out 1-D leaves',
    'mlp/normed': 'what is contracted at .* is computed from this leaf',
    'old': 'it has no part in what apply_fn returns',
}
AXES = {'heads/query': -3, 'heads/out': (-3, -2), 'mlp/kernel': -2}
PLANNED_MODEL = {'apply_fn': apply, 'batches': [jnp.arange(40) % 5]}


@pytest.mark.filterwarnings('ignore:these leaves stay dense')
@pytest.mark.parametrize('algorithm', ['magnitude', 'sparsegpt'])
def test_a_plan_with_a_model_tells_which_leaves_prune_leaves_dense_and_why(algorithm):
    dense = {} if algorithm != 'magnitude' else {'mlp/normed': None}  # it needs no input of each
    given = {'algorithm': algorithm, 'sparsity_type': dense | {'*': '2:4'}} | PLANNED_MODEL
    plan = jaxpruner.plan(PLANNED, **given)
    again = jaxpruner.plan(jax.eval_shape(lambda: PLANNED), **given)
    assert str(again) == str(plan)
    assert plan.note == ''
    assert 'prunes 3 of 8 leaves' in str(plan)
    _, masks = jaxpruner.prune(PLANNED, **given)
    paths, _, treedef = tree.flatten_with_paths(PLANNED)
    for path, mask in zip(paths, tree.leaves_like(treedef, masks), strict=True):
        leaf = plan[path]
        assert leaf.is_pruned == (mask is not None)
        if leaf.is_pruned:
            assert leaf.sparsity_type == NByM(2, 4, AXES[leaf.name])
            assert leaf.kept == mask.sum()
        elif leaf.name not in dense:
            assert re.match(WHY_DENSE[leaf.name], leaf.why_dense)
            assert leaf.kept == leaf.size
    assert plan.kept == plan.size - (192 + 192 + 64) // 2
    named = jaxpruner.plan(PLANNED, custom_sparsity_map={'tokens': None, 'old': 0.25}, **given)
    assert named['tokens'].why_dense


def test_a_plan_without_a_model_says_what_it_does_not_know():
    plan = SparseGPT(sparsity_type='2:4').plan(PLANNED)
    assert plan['heads/bias'].sparsity_type == NByM(2, 4, 'input')
    lines = str(plan).splitlines()
    assert lines[0] == 'SparseGPT prunes up to 7 of 8 leaves'
    assert 'plan(params, apply_fn=…, batches=…)' in ' '.join(lines[1:3])
    assert 'along axis' not in str(plan)
    assert '2:4 along the inputs' in str(plan)
    nothing = Wanda().plan(PLANNED)
    assert (nothing.note, nothing.pruned) == ('', ())
    plan = jaxpruner.plan(PARAMS, 0.5, 'snip')
    assert [leaf.name for leaf in plan.pruned] == ['down', 'up']
