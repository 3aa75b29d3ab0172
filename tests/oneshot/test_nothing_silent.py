"""Calls that once pruned nothing, or something else, and said nothing."""

import ast
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import rows
from helpers.random_numbers import Normal
from jaxpruner.oneshot import calibrate
from jaxpruner.sparsity_types import NByM
from oneshot import references

normal = Normal(4)

PARAMS = {'up': normal(8, 16), 'down': normal(16, 8), 'bias': normal(8)}
X = normal(32, 8)
CALIBRATED = ['wanda', 'ria', 'sparsegpt']
EACH_WAY = rows.crossed(CALIBRATED, [{}, {'sequential': True}])


def mlp(params, x):
    return jnp.tanh(x @ params['up']) @ params['down'] + params['bias']


def groups_along(mask, axis, n=2, m=4):
    """Whether of each m consecutive weights along an axis n are kept."""
    moved = np.moveaxis(np.asarray(mask), axis, -1)
    return bool((moved.reshape(-1, m).sum(-1) == n).all())


@pytest.mark.parametrize('algorithm', [*CALIBRATED, 'magnitude'])
def test_a_model_that_ignores_its_params_is_refused(algorithm):
    with pytest.raises(
        ValueError, match=r'does not depend on .*\(down, up\).*lambda params, x: model\.'
    ):
        jaxpruner.prune(
            PARAMS, 0.5, algorithm, apply_fn=lambda params, x: mlp(PARAMS, x), batches=[X]
        )


def test_to_calibrate_such_a_model_is_refused():
    with pytest.raises(ValueError, match='calibrate: what apply_fn returns does not depend on'):
        calibrate(lambda params, x: mlp(PARAMS, x), PARAMS, [X])


@pytest.mark.parametrize(('algorithm', 'settings'), EACH_WAY)
def test_one_leaf_that_has_no_part_is_warned_of_once(algorithm, settings):
    params = PARAMS | {'old': normal(4, 4)}
    with pytest.warns(
        UserWarning, match=r"old: this leaf has no part .* dense\. .*\{'old': None, '\*': …\}"
    ) as seen:
        _, masks = jaxpruner.prune(params, 0.5, algorithm, apply_fn=mlp, batches=[X], **settings)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert masks['old'] is None
    assert masks['up'].sum() == 64


def test_a_leaf_that_is_named_dense_is_not_warned_of():
    params = PARAMS | {'old': normal(4, 4)}
    _, masks = jaxpruner.prune(
        params,
        0.5,
        'wanda',
        apply_fn=mlp,
        batches=[X],
        sparsity_type={'old': None, '*': 'unstructured'},
    )
    assert masks['old'] is None


def normed(params, x):
    """Weight norm: what is contracted is computed from the leaf."""
    return mlp(params | {'up': params['up'] / jnp.linalg.norm(params['up'], axis=0)}, x)


@pytest.mark.parametrize(('algorithm', 'settings'), EACH_WAY)
def test_a_leaf_that_is_computed_with_before_use_stays_dense_alone(algorithm, settings):
    with pytest.warns(
        UserWarning, match=r"up: what is contracted .* computed .*\{'up': None, '\*': …\}"
    ) as seen:
        _, masks = jaxpruner.prune(PARAMS, 0.5, algorithm, apply_fn=normed, batches=[X], **settings)
    assert len(seen) == 1
    assert masks['up'] is None
    assert masks['down'].sum() == 64


def test_to_calibrate_follows_the_leaves_that_are_read_as_they_are():
    with pytest.warns(
        UserWarning, match='these leaves have no statistics, .* up: what is contracted'
    ):
        assert list(calibrate(normed, PARAMS, [X])) == [('down',)]
    with pytest.raises(ValueError, match='up: what is contracted'):
        calibrate(normed, PARAMS, [X], only='up')


def test_leaves_without_statistics_are_warned_of():
    calibration = calibrate(mlp, PARAMS, [X], only='up')
    pruner = jaxpruner.create_updater_from_config({'algorithm': 'wanda', 'sparsity': 0.5})
    with pytest.warns(UserWarning, match='down: the calibration has no statistics of these leaves'):
        assert pruner.instant_sparsify(PARAMS, calibration=calibration)[1]['down'] is None


@pytest.mark.parametrize(
    'sparsity_type', ['2:4', NByM(2, 4, axis='input'), {'up': '2:4', '*': NByM(2, 4)}]
)
@pytest.mark.parametrize('algorithm', ['magnitude', 'random', *CALIBRATED])
def test_groups_lie_along_the_inputs_of_a_model_that_is_given(algorithm, sparsity_type):
    params = {'up': normal(8, 12), 'down': normal(8, 12)}  # inputs first, then outputs first

    def apply(params, x):
        return jnp.tanh(x @ params['up']) @ params['down'].T

    _, masks = jaxpruner.prune(
        params, 0.5, algorithm, apply_fn=apply, batches=[X], sparsity_type=sparsity_type
    )
    assert groups_along(masks['up'], 0)
    assert groups_along(masks['down'], 1)


def test_an_axis_that_is_named_stays_and_the_default_does_not():
    params = {'up': normal(8, 12)}

    def mask_of(axis):
        model = {'apply_fn': lambda params, x: x @ params['up'], 'batches': [X]}
        sparsity_type = NByM(2, 4, axis=axis)
        _, masks = jaxpruner.prune(params, 0.5, **model, sparsity_type=sparsity_type)
        return masks['up']

    assert groups_along(mask_of(1), 1)
    assert groups_along(mask_of(-1), 0)  # the inputs: -1 may be the default, too


def test_groups_of_stacked_layers_lie_along_their_inputs():
    params = {'layers': {'kernel': normal(3, 8, 8), 'bias': normal(3, 8)}}

    def apply(params, x):
        body = lambda x, layer: (jnp.tanh(x @ layer['kernel'] + layer['bias']), None)  # noqa: E731
        return jax.lax.scan(body, x, params['layers'])[0]

    _, masks = jaxpruner.prune(
        params, 0.5, apply_fn=apply, batches=[X], sparsity_type='2:4', stacked='layers/*'
    )
    assert groups_along(masks['layers']['kernel'], 1)
    _, masks = jaxpruner.prune(params, 0.5, apply_fn=apply, batches=[X], sparsity_type='2:4')
    assert masks['layers']['bias'] is None  # two-dimensional, and no contraction reads it


def test_an_axis_that_is_named_stays_and_without_a_model_it_is_the_last():
    params = {'w': normal(8, 8)}
    given = {'apply_fn': lambda params, x: x @ params['w'].T, 'batches': [X]}
    _, masks = jaxpruner.prune(params, 0.5, sparsity_type='nm_2,4,0', **given)
    assert groups_along(masks['w'], 0)
    for last in ('nm_2,4,-1', NByM(2, 4)):
        _, masks = jaxpruner.prune(params, 0.5, sparsity_type=last)
        assert groups_along(masks['w'], 1)


@pytest.mark.parametrize('setting', ['1:2', 'nm_1,2', {'w': '1:2', '*': None}, [('*', '1:2')]])
def test_groups_without_an_axis_and_without_a_model_are_warned_of_once(setting):
    words = r"'(1:2|nm_1,2)' names no axis, .* apply_fn=… .* NByM\(1, 2, axis=…\); 'nm_1,2,-1'"
    with pytest.warns(UserWarning, match=words) as seen:
        _, masks = jaxpruner.prune({'w': normal(8, 8)}, sparsity_type=setting)
    assert (len(seen), seen[0].filename) == (1, __file__)
    assert groups_along(masks['w'], 1, 1, 2)


def heads(params, x):
    """Attention's kernels: a group of four may hold weights of two heads, of which each has six."""
    x = jnp.einsum('bi,ihd->bhd', x, params['query']) + params['bias']
    return jnp.einsum('bhd,hdo->bo', x, params['out'])


HEADS = {'query': normal(8, 4, 6), 'bias': normal(4, 6), 'out': normal(4, 6, 8)}


def windows(params, x):
    return jax.lax.conv_general_dilated(
        x, params['conv'], (1, 1), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )


WINDOWS = {'conv': normal(2, 2, 6, 8)}


@pytest.mark.parametrize(
    ('apply', 'params', 'inputs', 'name'),
    [(heads, HEADS, X, 'out'), (windows, WINDOWS, jnp.ones((2, 5, 5, 6)), 'conv')],
)
def test_all_algorithms_group_the_same_weights_where_several_axes_are_summed(
    apply, params, inputs, name
):
    *_, outputs = params[name].shape
    masks = {}
    for algorithm in ('magnitude', 'random', *CALIBRATED):
        _, found = jaxpruner.prune(
            params, algorithm=algorithm, apply_fn=apply, batches=[inputs], sparsity_type='2:4'
        )
        masks[algorithm] = np.asarray(found[name]).reshape(-1, outputs)
        assert groups_along(masks[algorithm], 0)
    if apply is windows:  # whose inputs have one norm
        np.testing.assert_array_equal(masks['magnitude'], masks['wanda'])


TIED = {'wte': normal(12, 8), 'wpe': normal(4, 8), 'w': normal(8, 8)}
TOKENS = jnp.arange(32).reshape(8, 4) % 12


def tied(params, tokens):
    x = params['wte'][tokens] + params['wpe']
    return jnp.tanh(x @ params['w']) @ params['wte'].T


@pytest.mark.parametrize(('algorithm', 'settings'), EACH_WAY)
def test_tied_lookups_are_left_alone_unless_they_are_named(algorithm, settings):
    given = {'algorithm': algorithm, 'apply_fn': tied, 'batches': [TOKENS]} | settings
    _, masks = jaxpruner.prune(TIED, 0.5, **given)
    assert (masks['wte'], masks['wpe']) == (None, None)
    assert masks['w'].sum() == 32
    for named in (
        {'custom_sparsity_map': {'wte': 0.5}},
        {'sparsity_type': {'wt*': 'unstructured', '*': None}},
    ):
        _, masks = jaxpruner.prune(TIED, 0.5, **given, **named)
        assert masks['wte'].sum() == 48


def test_lookups_are_left_alone_by_algorithms_that_look_at_weights_alone():
    given = {'apply_fn': tied, 'batches': [TOKENS]}
    _, masks = jaxpruner.prune(TIED, 0.5, **given)
    assert [name for name, mask in masks.items() if mask is not None] == ['w']
    _, masks = jaxpruner.prune(TIED, 0.5, **given, custom_sparsity_map={'wte': 0.5, 'wpe': 0.25})
    assert (masks['wte'].sum(), masks['wpe'].sum()) == (48, 24)
    _, masks = jaxpruner.prune(TIED, {'wte': 0.5, '*': 0.5}, **given, sparsity_type='2:4')
    assert masks['wpe'] is None
    assert groups_along(masks['wte'], 1)  # as the product that it is tied to reads it
    _, masks = jaxpruner.prune(TIED, 0.5)
    assert all(mask is not None for mask in masks.values())


def test_a_calibration_knows_lookups():
    calibration = calibrate(tied, TIED, [TOKENS])
    pruner = jaxpruner.create_updater_from_config({'algorithm': 'wanda', 'sparsity': 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        _, masks = pruner.instant_sparsify(TIED, calibration=calibration)
    assert [name for name, mask in masks.items() if mask is not None] == ['w']


def test_nothing_to_prune_is_refused():
    with pytest.raises(
        ValueError, match=r'Wanda has nothing to prune: .*\(wpe, wte\) none is a weight matrix'
    ):
        jaxpruner.prune(
            TIED,
            0.5,
            'wanda',
            apply_fn=tied,
            batches=[TOKENS],
            sparsity_type={'w': None, '*': 'unstructured'},
        )


def two_inputs(params, x, y):
    return mlp(params, x + y)


def loss(params, x, y):
    return jnp.mean(two_inputs(params, x, y) ** 2)


@pytest.mark.parametrize('batches', [[X, X], [[X, X]], (X, X), [(X, X, X)]])
@pytest.mark.parametrize('algorithm', [*CALIBRATED, 'magnitude', 'snip', 'synflow'])
def test_batches_that_hold_another_number_of_inputs_are_refused(algorithm, batches):
    name = 'loss_fn' if algorithm == 'snip' else 'apply_fn'
    given = {name: loss if algorithm == 'snip' else two_inputs}
    with pytest.raises(
        TypeError,
        match=rf'{name} takes params and 2 inputs, .* is a tuple: batches=\[\(x, y\), …\]',
    ):
        jaxpruner.prune(PARAMS, 0.5, algorithm, batches=batches, **given)


class Transition(NamedTuple):
    observation: jax.Array
    reward: jax.Array


NAMED_BATCHES = [
    (Transition(X, X), r'a Transition, .* apply_fn\(params, batch.observation, batch.reward\)'),
    ({'ids': X, 'mask': X}, r"a dict, .* apply_fn\(params, batch\['ids'\], batch\['mask'\]\)"),
    (X, r'a single array of shape \(32, 8\); a batch of several inputs is a tuple'),
]


@pytest.mark.parametrize(('batch', 'words'), NAMED_BATCHES)
def test_a_batch_that_is_one_input_says_how_to_pass_it_to_a_model_of_several(batch, words):
    with pytest.raises(
        TypeError, match=rf'takes params and 2 inputs, and the first batch is {words}'
    ):
        jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=two_inputs, batches=[batch])


@pytest.mark.parametrize('algorithm', [*CALIBRATED, 'magnitude', 'snip', 'grasp', 'synflow'])
def test_a_named_tuple_is_one_input(algorithm):
    def of_transition(params, batch):
        return jnp.mean(two_inputs(params, batch.observation, batch.reward) ** 2)

    name = 'loss_fn' if algorithm in ('snip', 'grasp') else 'apply_fn'
    rounds = {'rounds': 9} if algorithm == 'synflow' else {}

    def masks_of(function, batch):
        given = {name: function, 'batches': [batch]}
        return jaxpruner.prune(PARAMS, 0.5, algorithm, **given, **rounds)[1]

    found = masks_of(of_transition, Transition(X, X))
    expected = masks_of(loss, (X, X))
    assert found['up'].sum() < PARAMS['up'].size
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_plan_and_calibration_in_blocks_take_a_named_tuple_as_one_input():
    def of_transition(params, batch):
        return two_inputs(params, batch.observation, batch.reward)

    given = {'apply_fn': of_transition, 'batches': [Transition(X, X)]}
    pruner = jaxpruner.oneshot.Wanda(sparsity=0.5, sequential=True)
    assert pruner.plan(PARAMS, **given)['up'].target == 0.5
    assert pruner.instant_sparsify(PARAMS, **given)[1]['up'].sum() == 64


@pytest.mark.parametrize('settings', [{}, {'sequential': True}])
def test_an_array_as_batches_is_one_batch_with_a_warning(settings):
    expected = jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=mlp, batches=[X], **settings)
    with pytest.warns(
        UserWarning, match=r'array of shape \(32, 8\), .* one batch; .*batches=\[x\]'
    ) as seen:
        found = jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=mlp, batches=X, **settings)
    assert len(seen) == 1
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_few_samples_of_many_leaves_are_one_warning():
    for settings in ({}, {'sequential': True}):
        with pytest.warns(
            UserWarning, match=r'samples are fewer than inputs.*: (up .*, down|down .*, up) '
        ) as seen:
            jaxpruner.prune(
                {'up': PARAMS['up'], 'down': PARAMS['down']},
                0.5,
                'wanda',
                apply_fn=lambda params, x: jnp.tanh(x @ params['up']) @ params['down'],
                batches=[X[:2]],
                **settings,
            )
        assert len(seen) == 1


@pytest.mark.parametrize('algorithm', ['magnitude', 'wanda'])
def test_a_mapping_of_sparsities(algorithm):
    given = {'apply_fn': mlp, 'batches': [X]} if algorithm == 'wanda' else {}
    _, masks = jaxpruner.prune(PARAMS, {'up': 0.25, 'd*': 0.5}, algorithm, **given)
    assert (masks['up'].sum(), masks['down'].sum(), masks['bias']) == (96, 64, None)


def test_globs_take_no_biases_and_full_names_do():
    _, masks = jaxpruner.prune(PARAMS, {'up': None, '*': 0.5})
    assert (masks['up'], masks['bias']) == (None, None)
    _, masks = jaxpruner.prune(PARAMS, {'bias': 0.5})
    assert masks['bias'].sum() == 4
    _, masks = jaxpruner.prune(PARAMS, {'*': 0.5}, filter_fn=lambda path, leaf: leaf.ndim == 1)
    assert [name for name, mask in masks.items() if mask is not None] == ['bias']


def test_n_by_m_needs_no_sparsity():
    _, masks = jaxpruner.prune(PARAMS, sparsity_type='nm_1,4,-1')
    assert groups_along(masks['up'], 1, 1)
    given = {'apply_fn': mlp, 'batches': [X], 'sparsity_type': {'up': '1:4', '*': '2:4'}}
    for algorithm in ('magnitude', 'sparsegpt'):
        _, masks = jaxpruner.prune(PARAMS, algorithm=algorithm, **given)
        assert groups_along(masks['up'], 0, 1)
        assert groups_along(masks['down'], 0)


@pytest.mark.parametrize('algorithm', ['magnitude', 'wanda'])
def test_a_sparsity_that_contradicts_n_by_m_is_warned_of_once(algorithm):
    with pytest.warns(UserWarning, match='sparsity 0.9 contradicts the sparsity type 2:4') as seen:
        _, masks = jaxpruner.prune(
            PARAMS, 0.9, algorithm, apply_fn=mlp, batches=[X], sparsity_type='2:4'
        )
    assert len(seen) == 1
    assert groups_along(masks['up'], 0)


@pytest.mark.parametrize('algorithm', ['magnitude', *CALIBRATED])
def test_of_contradictions_only_leaves_that_are_pruned_are_named(algorithm):
    given = {'apply_fn': heads, 'batches': [X]}
    with pytest.warns(UserWarning, match='contradicts') as seen:
        _, masks = jaxpruner.prune(HEADS, 0.6, algorithm, sparsity_type='2:4', **given)
    assert masks['bias'] is None
    (message,) = [str(warning.message) for warning in seen]
    assert message.startswith('out (and 1 more leaves): sparsity 0.6')
    assert 'plan' not in message
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        jaxpruner.prune(HEADS, {'bias': 0.6, '*': 0.5}, 'wanda', sparsity_type='2:4', **given)


def test_of_contradictions_leaves_without_statistics_are_not_named():
    pruner = jaxpruner.oneshot.Wanda(sparsity=0.6, sparsity_type='2:4')
    statistics = dict(calibrate(heads, HEADS, [X]))
    with pytest.warns(UserWarning, match='out|bias') as seen:
        pruner.instant_sparsify(HEADS, calibration=statistics)
    words = ['out (and 1 more leaves): sparsity 0.6', 'bias: the calibration has no statistics']
    for warning, start in zip(seen, words, strict=True):
        assert str(warning.message).startswith(start)


@pytest.mark.parametrize('algorithm', ['magnitude', *CALIBRATED])
def test_a_plan_tells_which_leaves_prune_leaves_dense_and_why(algorithm):
    params = TIED | {'old': normal(4, 4), 'scale': jnp.ones(8), 'normed': normal(8, 8)}

    def apply(params, tokens):
        x = tied(params, tokens)[..., :8] * params['scale']
        return x @ (params['normed'] / jnp.linalg.norm(params['normed']))

    given = {'algorithm': algorithm, 'apply_fn': apply, 'batches': [TOKENS]}
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'old: this leaf|these leaves stay dense')
        plan = jaxpruner.plan(params, 0.5, **given)
        _, masks = jaxpruner.prune(params, 0.5, **given)
        named = jaxpruner.plan(params, 0.5, **given, custom_sparsity_map={'wte': 0.25})
    reasons = {leaf.name: leaf.why_dense for leaf in plan if leaf.why_dense}
    assert reasons.keys() == {name for name, mask in masks.items() if mask is None}
    words = {
        'wte': 'data look up its rows (an embedding)',
        'wpe': 'no contraction reads it',
        'old': 'it has no part in what apply_fn returns',
        'scale': 'the default filter leaves out 1-D leaves',
        'normed': 'what is contracted at',
    }
    if algorithm == 'magnitude':  # which needs no input of each weight
        del words['normed']
    assert reasons.keys() == words.keys()
    for name, start in words.items():
        assert reasons[name].startswith(start)
        assert f'dense: {start[:20]}' in str(plan)
    assert named['wte'].target == 0.25


def test_a_plan_of_an_algorithm_that_ranks_all_leaves_needs_no_model():
    plan = jaxpruner.plan(PARAMS, 0.5, 'snip')
    assert [leaf.name for leaf in plan.pruned] == ['down', 'up']
    shapes = jax.eval_shape(lambda: PARAMS)
    plan = jaxpruner.plan(
        shapes, sparsity_type='2:4', apply_fn=mlp, batches=[jax.ShapeDtypeStruct(X.shape, X.dtype)]
    )
    assert (plan['up'].sparsity_type.axis, plan['up'].kept) == (-2, 64)


# A stem, a depthwise convolution, squeeze and excitation of 6 channels, and a layer of 18.
MIXED = {
    'stem': normal(3, 3, 3, 8),
    'depthwise': normal(3, 3, 1, 8),
    'squeeze': normal(8, 6),
    'excite': normal(6, 8),
    'wide': normal(8, 18),
    'out': normal(18, 4),
}
IMAGES = normal(2, 6, 6, 3)


def cnn(params, x):
    def conv(x, kernel, groups=1):
        numbers = ('NHWC', 'HWIO', 'NHWC')
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), 'SAME', dimension_numbers=numbers, feature_group_count=groups
        )

    x = conv(conv(x, params['stem']), params['depthwise'], groups=8)
    gate = jax.nn.relu(x.mean((1, 2)) @ params['squeeze']) @ params['excite']
    x = (x * jax.nn.sigmoid(gate)[:, None, None]).mean((1, 2))
    return jax.nn.relu(x @ params['wide']) @ params['out']


@pytest.mark.parametrize('algorithm', [*CALIBRATED, 'magnitude'])
@pytest.mark.parametrize('sparsity_type', ['2:4', {'wide': '1:4', 'excite': '2:4', '*': 'nm_2,4'}])
def test_one_error_names_all_leaves_that_cannot_take_n_by_m_and_its_setting_works(
    algorithm, sparsity_type
):
    given = {'algorithm': algorithm, 'apply_fn': cnn, 'batches': [IMAGES]}
    refused = {'stem', 'depthwise', 'excite', 'out'}
    with pytest.raises(ValueError, match='leave them dense') as caught:
        jaxpruner.prune(MIXED, sparsity_type=sparsity_type, **given)
    reasons, _, setting = str(caught.value).partition('sparsity_type=')
    setting = ast.literal_eval(setting)
    assert all(f'{name}: ' in reasons for name in refused)
    # The rule for `excite` would have no leaf.
    others = {'*': '2:4'} if isinstance(sparsity_type, str) else {'wide': '1:4', '*': '2:4'}
    assert set(list(setting)[: -len(others)]) == refused
    assert list(setting.items())[-len(others) :] == list(others.items())
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'samples are fewer')
        _, masks = jaxpruner.prune(MIXED, sparsity_type=setting, **given)
    assert {name for name, mask in masks.items() if mask is None} == refused


BAD = [
    (lambda: jaxpruner.prune(PARAMS), ValueError, 'prune needs a sparsity'),
    (
        lambda: jaxpruner.prune(PARAMS, 'wanda'),
        TypeError,
        r"got 'wanda': prune\(params, 0.5, 'wanda'\)",
    ),
    (
        lambda: jaxpruner.prune(PARAMS, {'upp': 0.5}),
        ValueError,
        "sparsity: 'upp' matches no parameter",
    ),
    (
        lambda: jaxpruner.prune(PARAMS, {'up': 1.5}),
        ValueError,
        r"sparsity\['up'\] must lie in \[0, 1\]",
    ),
    (
        lambda: jaxpruner.prune(PARAMS, {'up': 0.5}, dist_type='erk'),
        ValueError,
        'leave dist_type out',
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, apply_fn=mlp),
        ValueError,
        'takes both apply_fn=… and batches=…',
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=mlp),
        ValueError,
        r"'wanda' looks .* prune lacks batches=…: .* prune\(…, apply_fn=…, batches=…\)$",
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, 'ria', batches=[X]),
        ValueError,
        "'ria' looks .* prune lacks apply_fn=…: ",
    ),
    (
        lambda: jaxpruner.oneshot.Wanda(sparsity=0.5).instant_sparsify(PARAMS),
        ValueError,
        'Wanda looks .* instant_sparsify lacks apply_fn=… and batches=…: .* a calibration=…',
    ),
    (
        lambda: jaxpruner.oneshot.Wanda(sparsity=0.5).plan(PARAMS, batches=[X]),
        ValueError,
        'Wanda looks .* plan lacks apply_fn=…: ',
    ),
    (
        lambda: jaxpruner.plan(PARAMS, 0.5, apply_fn=mlp),
        ValueError,
        r"'magnitude' .* plan lacks batches=…: .* or neither",
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, apply_fn=mlp, batches=3),
        TypeError,
        'iterable of batches, .* got 3',
    ),
]


@pytest.mark.parametrize(('call', 'error', 'message'), BAD)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize('algorithm', [*CALIBRATED, 'magnitude'])
def test_a_list_of_inputs_is_refused_though_the_model_takes_any_number(algorithm):
    def apply(params, *inputs):
        return two_inputs(params, *inputs)

    with pytest.raises(
        TypeError, match=r'apply_fn fails on the first batch, a list of 2.* is a tuple'
    ):
        jaxpruner.prune(PARAMS, 0.5, algorithm, apply_fn=apply, batches=[[X, X]])


def test_a_model_may_take_a_list_as_its_one_input():
    def apply(params, inputs):
        return two_inputs(params, *inputs)

    _, masks = jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=apply, batches=[[X, X]])
    assert int(masks['up'].sum()) == 64


def test_a_keyword_that_the_model_needs_is_named():
    def apply(params, x, *, train):
        return mlp(params, x)

    with pytest.raises(TypeError, match=r'apply_fn needs train=…; bind them: functools\.partial'):
        jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=apply, batches=[X])


@pytest.mark.parametrize('algorithm', ['wanda', 'ria'])
def test_weights_of_nan_are_named(algorithm):
    params = PARAMS | {'up': PARAMS['up'].at[0, 0].set(jnp.nan)}
    calibration = calibrate(mlp, PARAMS, [X])
    pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, 'sparsity': 0.5})
    with pytest.warns(UserWarning, match='these leaves hold NaN.*: up;') as seen:
        _, masks = pruner.instant_sparsify(params, calibration=calibration)
    assert len(seen) == 1
    assert masks['up'][0, 0] == 0


def with_zeros(share):
    """Both matrices with their smallest weights set to zero; one has more zeros than asked for, and one has fewer."""
    params = {name: np.asarray(PARAMS[name]).copy() for name in ('up', 'down')}
    for name, part in (('up', share + 0.25), ('down', share - 0.25)):
        sizes = np.abs(params[name])
        params[name][sizes <= np.quantile(sizes, part)] = 0
    return jax.tree.map(jnp.asarray, params) | {'bias': PARAMS['bias']}


@pytest.mark.parametrize('settings', [{}, {'sequential': True}])
@pytest.mark.parametrize('sparsity_type', ['unstructured', '2:4'])
def test_sparsegpt_revives_no_weight_of_a_model_with_more_zeros_than_asked_for(
    sparsity_type, settings
):
    given = {'algorithm': 'sparsegpt', 'apply_fn': mlp, 'batches': [X]} | settings
    given['sparsity_type'] = sparsity_type

    def revived(params, **keep_zeros):
        pruned, masks = jaxpruner.prune(params, 0.5, **given, **keep_zeros)
        number = 0
        for name in ('up', 'down'):
            values = np.asarray(pruned[name])
            number += int((values[np.asarray(params[name] == 0)] != 0).sum())
            if sparsity_type == '2:4':
                assert (values.reshape(-1, 4, values.shape[1]) != 0).sum(1).max() == 2
            if keep_zeros != {'keep_zeros': False}:
                np.testing.assert_array_equal(masks[name] != 0, values != 0)
        return number

    sparse = with_zeros(0.6)
    words = r'0\.59\d+ of the weights .* zero already, more than the 0\.5 .*keep_zeros=True.*keep_zeros=False'
    with pytest.warns(UserWarning, match=words) as seen:
        assert revived(sparse) == 0
    assert len(seen) == 1
    assert revived(sparse, keep_zeros=True) == 0
    if sparsity_type == '2:4':  # of one block the zeros are removed first
        assert revived(sparse, keep_zeros=False) > 0
    with_few_zeros = with_zeros(0.4)
    assert revived(with_few_zeros, keep_zeros=True) == 0
    pruned, _ = jaxpruner.prune(with_few_zeros, 0.5, **given)
    again, _ = jaxpruner.prune(with_few_zeros, 0.5, **given, keep_zeros=False)
    jax.tree.map(np.testing.assert_array_equal, pruned, again)


def test_masks_from_elsewhere_say_which_zeros_stay():
    masks = {'up': jnp.ones((8, 16), jnp.uint8), 'down': None, 'bias': None}
    given = {'algorithm': 'sparsegpt', 'apply_fn': mlp, 'batches': [X], 'masks': masks}
    with pytest.raises(ValueError, match='masks say which weights go: leave keep_zeros out'):
        jaxpruner.prune(PARAMS, keep_zeros=True, **given)


EXPERTS = {'experts': normal(4, 8, 6).at[3, 0, 0].set(3.2)}
SIZES = jnp.array([30, 20, 14, 0])


def ragged(params, x):
    return jax.lax.ragged_dot(x, params['experts'], SIZES)


def dispatched(params, x):
    """Each expert takes rows of its own; those of the last are zeros, and counted."""
    rows = jnp.stack([x[:30], x[34:], x[4:34], jnp.zeros((30, 8))])
    return jnp.einsum('eri,eio->ero', rows, params['experts'])


def scanned(params, x):
    """The experts are layers, of which the last gets nothing."""
    gates = jnp.array([1.0, 1.0, 1.0, 0.0])

    def body(x, layer):
        weights, gate = layer
        return x, (x * gate) @ weights

    return jax.lax.scan(body, x, (params['experts'], gates))[1]


UNSEEN = rows.crossed(
    [ragged, dispatched, scanned], ['unstructured', '2:4'], CALIBRATED, [{}, {'sequential': True}]
)


@pytest.mark.parametrize(('apply', 'sparsity_type', 'algorithm', 'settings'), UNSEEN)
def test_matrices_whose_inputs_never_occur_lose_their_smallest_weights(
    apply, sparsity_type, algorithm, settings
):
    name = 'experts, layer 3' if apply is scanned else 'experts, matrix 3'
    with pytest.warns(UserWarning, match='ranked by magnitude') as seen:
        pruned, masks = jaxpruner.prune(
            EXPERTS,
            0.5,
            algorithm,
            apply_fn=apply,
            batches=[normal(64, 8) * jnp.arange(1, 9) ** 2],
            sparsity_type=sparsity_type,
            **settings,
        )
    (message,) = [str(warning.message) for warning in seen]
    assert f': {name};' in message
    sizes = np.abs(EXPERTS['experts'][3])
    n_by_m = (2, 4) if sparsity_type == '2:4' else None
    per = 'output' if algorithm == 'wanda' else 'layer'
    expected = references.mask_of(sizes, 0.5, n_by_m, per)
    np.testing.assert_array_equal(masks['experts'][3], expected)
    np.testing.assert_array_equal(pruned['experts'][3], EXPERTS['experts'][3] * expected)
    assert pruned['experts'][3, 0, 0] == np.float32(3.2)
    by_magnitude = references.mask_of(np.abs(EXPERTS['experts'][0]), 0.5, n_by_m, per)
    assert (masks['experts'][0] != by_magnitude).any()


# Of leaves of 2:4 those that the map names have what it says, the others the type's own share.
NAMED_BESIDE_N_BY_M = {
    'dense': (None, 128),
    'zero': (0.0, 128),
    'the share': (0.5, 64),
}


@pytest.mark.parametrize(
    ('value', 'kept'), NAMED_BESIDE_N_BY_M.values(), ids=list(NAMED_BESIDE_N_BY_M)
)
@pytest.mark.parametrize('dist_type', ['uniform', 'erk'])
def test_n_by_m_has_its_own_share_in_leaves_that_a_custom_map_does_not_name(value, kept, dist_type):
    settings = {'custom_sparsity_map': {'up*': value}, 'dist_type': dist_type}
    n_by_m = NByM(2, 4, axis=0)
    pruned, _ = jaxpruner.prune(PARAMS, sparsity_type=n_by_m, **settings)
    config = {'algorithm': 'magnitude', 'sparsity_type': n_by_m} | settings
    targets = jaxpruner.create_updater_from_config(config).get_target_sparsities(PARAMS)
    assert int(jnp.count_nonzero(pruned['up'])) == kept
    assert int(jnp.count_nonzero(pruned['down'])) == 64
    assert targets['down'] == 0.5


def test_a_sparsity_that_contradicts_n_by_m_is_named_in_a_custom_map_too():
    with pytest.warns(UserWarning, match=r'^up: sparsity 0\.9 contradicts .* 2:4') as seen:
        jaxpruner.prune(PARAMS, sparsity_type=NByM(2, 4), custom_sparsity_map={'up': 0.9})
    assert len(seen) == 1


def test_a_custom_map_alone_holds_where_all_leaves_are_ranked_together():
    config = {'algorithm': 'snip', 'custom_sparsity_map': {'up': 0.5}}
    targets = jaxpruner.create_updater_from_config(config).get_target_sparsities(PARAMS)
    assert targets['up'] == 0.5


def ones_of(scores, sparsity):
    del sparsity
    return jnp.ones(scores.shape, jnp.uint8)


def sum_of_squares(params, x):
    return jnp.sum(mlp(params, x) ** 2)


VECTORS = {'scale': normal(8), 'shift': normal(8)}
# A call that prunes nothing, and what its warning says of the reason.
PRUNES_NOTHING = {
    'sparsity 0': (lambda: jaxpruner.prune(PARAMS, 0.0), 'down, up: its target is 0'),
    'vectors': (lambda: jaxpruner.prune(VECTORS, 0.5), 'the default filter leaves out 1-D leaves'),
    'less than one weight': (lambda: jaxpruner.prune({'w': normal(1, 2)}, 0.1), 'less than one'),
    'a mapping of dense leaves': (lambda: jaxpruner.prune(PARAMS, {'*': None}), 'down, up'),
    'all dense by type': (
        lambda: jaxpruner.prune(PARAMS, 0.5, sparsity_type={'*': None}),
        'its sparsity type is None',
    ),
    'integers': (lambda: jaxpruner.prune({'table': jnp.ones((2, 2), int)}, 0.5), 'table: int'),
    'N:M at 0': (lambda: jaxpruner.prune(PARAMS, 0.0, sparsity_type=NByM(2, 4)), 'target is 0'),
    'no parameters': (lambda: jaxpruner.prune({}, 0.5), 'there are no parameters'),
    'an own ranking': (
        lambda: jaxpruner.prune(PARAMS, 0.5, topk_fn=ones_of),
        'masks keep every weight, those of down, up',
    ),
    'all leaves together': (
        lambda: jaxpruner.prune(PARAMS, 0.0, 'global_magnitude'),
        'down, up: its target is 0',
    ),
    'along inputs': (
        lambda: jaxpruner.prune(PARAMS, 0.0, apply_fn=mlp, batches=[X]),
        'down, up: its target is 0',
    ),
    'calibrated': (
        lambda: jaxpruner.prune(PARAMS, 0.0, 'wanda', apply_fn=mlp, batches=[X]),
        'down, up: its target is 0',
    ),
    'at initialization': (
        lambda: jaxpruner.prune(PARAMS, 0.0, 'snip', loss_fn=sum_of_squares, batches=[X]),
        'down, up: its target is 0',
    ),
    'at initialization, no leaf': (
        lambda: jaxpruner.prune(
            PARAMS, 0.5, 'snip', loss_fn=sum_of_squares, batches=[X], sparsity_type={'*': None}
        ),
        'its sparsity type is None',
    ),
    'given masks': (
        lambda: jaxpruner.FixedMask(jax.tree.map(jnp.ones_like, PARAMS)).instant_sparsify(PARAMS),
        'bias, down, up: its target is 0',
    ),
    'a strategy': (
        lambda: jaxpruner.jax_pruning.StrategyPruning(
            {1: {'method': 'unstr_local', 'prune_rate_pattern': 1.0}}, steps_per_epoch=1
        ).instant_sparsify({'layer': {'kernel': PARAMS['up']}}),
        'layer/kernel: its target is 0',
    ),
    'traced': (lambda: jax.jit(lambda p: jaxpruner.prune(p, 0.0))(PARAMS), 'its target is 0'),
}


@pytest.mark.parametrize(('call', 'reason'), PRUNES_NOTHING.values(), ids=list(PRUNES_NOTHING))
def test_what_prunes_nothing_says_so_once(call, reason):
    with pytest.warns(UserWarning, match=f'prunes no.*{reason}') as seen:
        call()
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_no_pruning_is_no_news():
    pruned, masks = jaxpruner.prune(PARAMS, 0.5, 'no_prune')  # warnings are errors
    assert pruned is PARAMS
    assert masks == dict.fromkeys(PARAMS)


def test_a_pruner_that_has_kept_zeros_equals_one_of_the_same_settings():
    used, unused = (
        jaxpruner.oneshot.SparseGPT(sparsity=0.5),
        jaxpruner.oneshot.SparseGPT(sparsity=0.5),
    )
    with pytest.warns(UserWarning, match='zero already'):
        used.instant_sparsify(with_zeros(0.6), apply_fn=mlp, batches=[X])
    assert used == unused
    assert hash(used) == hash(unused)
