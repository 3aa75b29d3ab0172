"""Whole models pruned with statistics of their inputs, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import rows
from jaxpruner.oneshot import RIA, SparseGPT, Wanda, calibrate, owl_sparsities
from jaxpruner.sparsity_types import Block, NByM, Unstructured
from oneshot import model, references

DENSE = ('embedding', 'bias')


@pytest.fixture(scope='module')
def calibration():
    return calibrate(model.apply, model.PARAMS, model.BATCHES, kind='gram')


@pytest.fixture(scope='module')
def samples():
    return model.samples(model.PARAMS)


def matrices_of(tree, calibration, name):
    """All weight matrices of a leaf, `[number, inputs, outputs]`."""
    parts = [entry.matrices.read(tree[name].astype(jnp.float32)) for entry in calibration[name]]
    return np.concatenate([np.asarray(part).reshape(-1, *part.shape[-2:]) for part in parts])


SCORES = {'wanda': references.wanda, 'ria': references.ria}


@pytest.mark.parametrize(
    ('algorithm', 'pattern'),
    rows.crossed(['wanda', 'ria', 'sparsegpt'], ['unstructured', '2:4']),
)
def test_models_are_pruned_as_the_references_prune_matrices(
    algorithm, pattern, calibration, samples
):
    config = {'algorithm': algorithm, 'sparsity': 0.5, 'sparsity_type': pattern}
    pruner = jaxpruner.create_updater_from_config(config)
    params, masks = pruner.instant_sparsify(model.PARAMS, calibration=calibration)
    assert all(masks[name] is None and params[name] is model.PARAMS[name] for name in DENSE)
    n_by_m = None if pattern == 'unstructured' else (2, 4)
    for name in samples:
        inputs = samples[name].reshape(-1, *samples[name].shape[-2:])
        old, new, kept = (
            matrices_of(tree, calibration, name) for tree in (model.PARAMS, params, masks)
        )
        for i, (before, after, mask) in enumerate(zip(old, new, kept, strict=True)):
            x = inputs[i % len(inputs)]
            if algorithm == 'sparsegpt':
                weights, expected = references.sparsegpt(before, x, 0.5, n_by_m)
            else:
                scores = SCORES[algorithm](before.astype(np.float64), x)
                expected = references.mask_of(
                    scores, 0.5, n_by_m, 'output' if algorithm == 'wanda' else 'layer'
                )
                weights = before * expected
            np.testing.assert_array_equal(mask, expected, err_msg=name)
            np.testing.assert_allclose(
                after, weights, atol=1e-4 * np.abs(weights).max(), err_msg=name
            )


def test_one_call_calibrates_and_prunes(calibration):
    params, masks = jaxpruner.prune(
        model.PARAMS, 0.5, 'wanda', apply_fn=model.apply, batches=iter(model.BATCHES), per='layer'
    )
    expected, _ = jaxpruner.prune(model.PARAMS, 0.5, 'magnitude')
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    alone = Wanda(per='layer', sparsity_distribution_fn=lambda params: dict.fromkeys(params, 0.5))
    again = alone.instant_sparsify(model.PARAMS, calibration=calibration)[1]
    jax.tree.map(np.testing.assert_array_equal, masks, again)
    tuned = jaxpruner.FixedMask(masks).instant_sparsify(params)[0]
    jax.tree.map(np.testing.assert_array_equal, tuned, params)


def test_parameters_that_are_given_away_are_changed_in_place(calibration):
    given = jax.tree.map(jnp.copy, model.PARAMS)
    pruner = jaxpruner.create_updater_from_config({'algorithm': 'sparsegpt', 'sparsity': 0.5})
    taken, taken_masks = pruner.instant_sparsify(given, calibration=calibration, donate=True)
    pruned, masks = pruner.instant_sparsify(model.PARAMS, calibration=calibration)
    jax.tree.map(np.testing.assert_array_equal, (taken, taken_masks), (pruned, masks))
    assert {name for name, array in given.items() if array.is_deleted()} == {
        name for name, mask in masks.items() if mask is not None
    }
    assert not any(array.is_deleted() for array in model.PARAMS.values())


class LargestOfInput(Wanda):
    """Scores a weight by its rank among the weights of its input, so that all outputs have a part in a score."""

    def score_matrices(self, weights, second_moment):
        del second_moment
        order = jnp.argsort(jnp.abs(weights), axis=-1)
        return jnp.argsort(order, axis=-1).astype(jnp.float32)


class LargestOfInputInLayer(RIA):
    score_matrices = LargestOfInput.score_matrices


@pytest.mark.parametrize('outputs', [6, 300])  # Wanda masks 256 outputs at a time
@pytest.mark.parametrize('pruner_class', [LargestOfInput, LargestOfInputInLayer])
def test_a_subclass_prunes_by_its_own_scores(pruner_class, outputs):
    weights = model.normal(8, outputs)
    pruner = pruner_class(sparsity_distribution_fn=lambda params: {'w': 0.5})
    _, masks = pruner.instant_sparsify(
        {'w': weights},
        apply_fn=lambda params, x: x @ params['w'],
        batches=[model.normal(32, 8)],
    )
    scores = pruner.score_matrices(weights, jnp.ones(8))
    expected = references.mask_of(np.asarray(scores), 0.5, None, pruner.per)
    np.testing.assert_array_equal(masks['w'], expected)


@pytest.mark.parametrize('pruner_class', [Wanda, RIA])
def test_scores_that_are_replaced_on_one_pruner_count(pruner_class):
    pruner = pruner_class(sparsity_distribution_fn=lambda params: {'w': 0.5})
    pruner.score_matrices = lambda weights, second_moment: -jnp.abs(weights)
    _, masks = pruner.instant_sparsify(
        {'w': jnp.array([[1.0], [2.0]])},
        apply_fn=lambda params, x: x @ params['w'],
        batches=[jnp.ones((4, 2))],
    )
    assert masks['w'].tolist() == [[1], [0]]


class Counting(SparseGPT):
    """Counts how often Gram matrices are decomposed."""

    def prepare(self, statistics, donate):
        self.prepared = [*getattr(self, 'prepared', []), statistics]
        return super().prepare(statistics, donate)


@pytest.mark.parametrize('sequential', [False, True])
def test_leaves_that_share_their_inputs_share_a_decomposition(sequential):
    params = {name: model.normal(8, 6) for name in ('query', 'key', 'value')} | {
        'out': model.normal(6, 8)
    }

    def attention(params, x):
        query, key, value = (x @ params[name] for name in ('query', 'key', 'value'))
        return jax.nn.softmax(query @ key.T) @ value @ params['out']

    half = {'sparsity_distribution_fn': lambda params: dict.fromkeys(params, 0.5)}
    counting = Counting(**half, sequential=sequential)
    _, masks = counting.instant_sparsify(params, apply_fn=attention, batches=[model.normal(32, 8)])
    assert sorted(statistics.gram.shape for statistics in counting.prepared) == [(6, 6), (8, 8)]
    assert all(
        statistics.gram.is_deleted() for statistics in counting.prepared
    )  # the factors have taken their place
    assert all(int(mask.sum()) == 24 for mask in masks.values())


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'int32', 'numpy'])
def test_statistics_that_are_given_may_have_any_dtype_and_stay(dtype):
    # Sums of few small whole numbers, which every dtype holds: rounded ones could prune another weight.
    params, x = {'w': model.normal(8, 6)}, jnp.round(model.normal(32, 8))
    found = calibrate(lambda params, x: x @ params['w'], params, [x], kind='gram')
    (entry,) = found['w']
    gram = (
        np.asarray(entry.statistics.gram)
        if dtype == 'numpy'
        else entry.statistics.gram.astype(dtype)
    )
    given = {('w',): (entry._replace(statistics=entry.statistics._replace(gram=gram)),)}
    pruner = SparseGPT(sparsity_distribution_fn=lambda params: {'w': 0.5})
    expected, _ = pruner.instant_sparsify(params, calibration=found)
    for _ in range(2):
        pruned, _ = pruner.instant_sparsify(params, calibration=given)
        np.testing.assert_allclose(pruned['w'], expected['w'], rtol=2e-2, atol=2e-2)


def test_of_statistics_that_are_given_one_layer_is_decomposed_at_a_time():
    params = {'w': model.normal(3, 6, 6)}
    found = calibrate(
        lambda params, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params['w'])[0],
        params,
        [model.normal(32, 6)],
        kind='gram',
    )
    counting = Counting(sparsity_distribution_fn=lambda params: {'w': 0.5})
    counting.instant_sparsify(params, calibration=found)
    assert [statistics.gram.shape for statistics in counting.prepared] == [(6, 6)] * 3


def test_an_array_that_is_two_leaves_is_not_given_away_twice():
    kernel = jnp.arange(1.0, 10).reshape(3, 3)
    pruned, _ = jaxpruner.prune(
        {'first': kernel, 'second': kernel},
        1 / 3,
        'wanda',
        apply_fn=lambda params, x: jnp.tanh(x @ params['first']) @ params['second'],
        batches=[jnp.eye(3)],
        donate=True,
    )
    assert int((pruned['first'] == 0).sum()) == int((pruned['second'] == 0).sum()) == 3


@pytest.mark.parametrize('algorithm', ['wanda', 'sparsegpt'])
def test_leaves_that_are_put_beside_each_other_are_pruned_as_if_alone(algorithm):
    params = {
        'hidden': {'kernel': model.normal(8, 6), 'bias': model.normal(6)},
        'gate': {'kernel': model.normal(8, 4)},
    }

    def beside(params, x):
        kernels = jnp.concatenate([params['gate']['kernel'], params['hidden']['kernel']], -1)
        gate, hidden = jnp.split(x @ kernels, [4], -1)
        return jnp.tanh(gate) @ jnp.ones((4, 6)) * (hidden + params['hidden']['bias'])

    def alone(params, x):
        return x @ params['gate']['kernel'], x @ params['hidden']['kernel'] + params['hidden'][
            'bias'
        ]

    settings = {'sparsity': 0.5, 'algorithm': algorithm, 'batches': [model.normal(32, 8)]}
    found, expected = (
        jaxpruner.prune(params, apply_fn=apply_fn, **settings) for apply_fn in (beside, alone)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found[1]['gate']['kernel'].sum() == 16


def test_owl_gives_each_leaf_its_own_sparsity(calibration, samples):
    pruner = Wanda(
        sparsity_distribution_fn=lambda params: (
            dict.fromkeys(params, None) | {'stack': 0.5, 'out': 0.7}
        ),
        owl=True,
        owl_per='leaf',
        owl_multiple=1.5,
    )
    _, masks = pruner.instant_sparsify(model.PARAMS, calibration=calibration)
    layers = [*zip(np.asarray(model.PARAMS['stack']), samples['stack'], strict=True)]
    layers.append((np.asarray(model.PARAMS['out']).T, samples['out']))
    scores = [references.wanda(weights.astype(np.float64), inputs) for weights, inputs in layers]
    shares, sizes = (
        [(one > 1.5 * one.mean()).mean() for one in scores],
        [one.size for one in scores],
    )
    found = owl_sparsities(shares, sizes, (0.5 * 192 + 0.7 * 24) / 216)
    kept = [masks['stack'][0], masks['stack'][1], masks['stack'][2], masks['out'].T]
    for mask, sparsity, score in zip(kept, found, scores, strict=True):
        np.testing.assert_array_equal(mask, references.mask_of(score, sparsity))


def test_weights_that_are_cast_keep_their_dtype_and_place():
    params = {'w': model.normal(8, 4), 'b': jnp.ones(4)}

    def apply(params, x):
        return x.astype(jnp.bfloat16) @ params['w'].astype(jnp.bfloat16) + params['b']

    new, masks = jaxpruner.prune(
        params, 0.5, 'sparsegpt', apply_fn=apply, batches=[model.normal(32, 8)]
    )
    assert new['w'].dtype == jnp.float32
    assert masks['w'].sum() == 16
    assert (np.asarray(new['w'] == 0) == np.asarray(masks['w'] == 0)).all()
    wanda, masks = jaxpruner.prune(
        params, 0.5, 'wanda', apply_fn=apply, batches=[model.normal(32, 8)]
    )
    np.testing.assert_array_equal(wanda['w'], params['w'] * masks['w'])


class Pooled(Unstructured):
    """Pools scores, although it derives from the type that does not."""

    def group_scores(self, scores):
        return scores.mean(0)


def linear(params, x):
    return x @ params['w']


PARAMS = {'w': jnp.ones((6, 4))}
X = [jnp.asarray(np.random.default_rng(0).normal(size=(9, 6)), jnp.float32)]
BAD = [
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, 'wanda'),
        ValueError,
        "'wanda' looks at the inputs of each layer, and prune lacks apply_fn=… and batches=…",
    ),
    (
        lambda: jaxpruner.prune(
            PARAMS, 0.5, 'ria', apply_fn=linear, batches=X, sparsity_type='2:4'
        ),
        ValueError,
        'w: its 6 inputs do not divide into groups of m=4',
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, 'ria', apply_fn=linear, batches=[]),
        ValueError,
        'batches are empty',
    ),
    (
        lambda: jaxpruner.prune(
            {'w': jnp.ones((4, 2, 3, 3))},
            0.5,
            'sparsegpt',
            apply_fn=lambda params, x: jax.lax.conv(x, params['w'], (1, 1), 'SAME'),
            batches=[jnp.ones((0, 2, 5, 5))],
        ),
        ValueError,
        r'batches\[0\] holds no samples: its inputs have shapes \(0, 2, 5, 5\); leave it out',
    ),
    (
        lambda: jaxpruner.prune(
            {'w': PARAMS['w'] * jnp.nan}, 0.5, 'sparsegpt', apply_fn=linear, batches=X
        ),
        ValueError,
        'w: its new weights are not finite; look for NaN or inf',
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, donate=True),
        ValueError,
        "'magnitude' makes a copy: leave donate out, or choose wanda, ria or sparsegpt",
    ),
    (
        lambda: Wanda(sparsity_type=Block((2, 2))),
        TypeError,
        'calibrated pruning is unstructured or N:M, got Block',
    ),
    (
        lambda: Wanda(sparsity_type=Pooled()),
        TypeError,
        'calibrated pruning is unstructured or N:M, got Pooled',
    ),
    (
        lambda: Wanda(sparsity_type='2:4', owl=True),
        ValueError,
        'owl=True chooses sparsities, which NByM',
    ),
    (lambda: Wanda(owl=True, owl_per='layer'), ValueError, "owl_per must be .* got 'layer'"),
    (lambda: RIA(per='row'), ValueError, "per must be .* got 'row'"),
    (
        lambda: Wanda(topk_fn=jnp.abs),
        ValueError,
        'Wanda ranks weights itself: topk_fn has no meaning',
    ),
    (
        lambda: SparseGPT(damping=-1.0),
        ValueError,
        'damping must be a finite number from 0 up, got -1.0',
    ),
    (
        lambda: SparseGPT().wrap_optax(None),
        TypeError,
        r'SparseGPT prunes once .* FixedMask\(masks\)',
    ),
    (
        lambda: jaxpruner.prune(PARAMS, 0.5, 'wandas'),
        ValueError,
        "algorithm 'wandas' is unknown; did you mean 'wanda'",
    ),
]


@pytest.mark.filterwarnings('ignore:.*Gram matrices could not be decomposed')
@pytest.mark.parametrize(('call', 'error', 'message'), BAD)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_few_samples_and_more_damping_are_warned_of():
    with pytest.warns(
        UserWarning, match=r'samples are fewer than inputs.*: w \(2 samples, 6 inputs\); .* 3 times'
    ):
        jaxpruner.prune(PARAMS, 0.5, 'wanda', apply_fn=linear, batches=[X[0][:2]])
    with pytest.warns(
        UserWarning, match=r'Gram matrices could not be decomposed with damping 0.0: w \('
    ):
        jaxpruner.prune(
            PARAMS, 0.5, 'sparsegpt', apply_fn=linear, batches=[jnp.ones((9, 6))], damping=0.0
        )


def test_n_by_m_lies_along_the_inputs_whatever_the_layout(calibration):
    pruner = Wanda(
        sparsity_type={'conv': NByM(1, 4), '*': None},
        sparsity_distribution_fn=lambda p: dict.fromkeys(p, 0.75),
    )
    _, masks = pruner.instant_sparsify(model.PARAMS, calibration=calibration)
    assert [name for name, mask in masks.items() if mask is not None] == ['conv']
    np.testing.assert_array_equal(
        masks['conv'].sum(2), 1
    )  # one of four channels, at each place of each output
