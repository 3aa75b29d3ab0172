"""Models, trees and batches that are seldom seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers.random_numbers import Normal
from jaxpruner.oneshot import SparseGPT, Wanda, calibrate, sequential

normal = Normal(6)


def linear(params, x):
    return x @ params['w']


def moment(calibration, path):
    (entry,) = calibration[path]
    return np.asarray(entry.statistics.second_moment)


def last_four(params, x):
    """Of short batches both leaves meet the same value."""
    recent = x if x.shape[1] <= 4 else x[:, -4:]
    return (recent @ params['a']).sum() + (x @ params['b']).sum()


@pytest.mark.parametrize('lengths', [(6, 4), (4, 6)])
@pytest.mark.parametrize('in_blocks', [False, True])
def test_shapes_with_which_other_leaves_share_their_inputs_are_refused(lengths, in_blocks):
    params = {'a': normal(8, 4), 'b': normal(8, 4)}
    take = sequential.SequentialCalibration if in_blocks else calibrate
    with pytest.raises(
        ValueError, match=r'other leaves meet the same value, .* give batches of one shape'
    ):
        take(last_four, params, [normal(2, length, 8) for length in lengths])


def test_batches_of_several_lengths_are_added_up():
    batches = [normal(2, length, 8) for length in (6, 4, 6)]
    found = calibrate(linear, {'w': normal(8, 4)}, batches)
    expected = sum((np.asarray(batch, np.float64) ** 2).sum((0, 1)) for batch in batches)
    np.testing.assert_allclose(moment(found, 'w'), expected, rtol=1e-5)


def test_scanned_layers_with_64_bits():
    def scanned(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params['w'])[0]

    with jax.enable_x64(True) if hasattr(jax, 'enable_x64') else jax.experimental.enable_x64():
        found = calibrate(
            scanned, {'w': jnp.ones((3, 4, 4), jnp.float32)}, [jnp.ones((5, 4), jnp.float32)]
        )
    assert moment(found, 'w').shape == (3, 4)


BESIDE = {
    'concatenated': lambda q, k: jnp.concatenate([q, k], 1),
    'stacked': lambda q, k: jnp.stack([q, k], 1).reshape(8, -1),
}


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('how', BESIDE)
def test_narrow_leaves_that_are_put_beside_each_other(how, dtype):
    params = {'q': normal(8, 4).astype(dtype), 'k': normal(8, 4).astype(dtype)}
    _, masks = jaxpruner.prune(
        params,
        0.5,
        'wanda',
        apply_fn=lambda params, x: x @ BESIDE[how](params['q'], params['k']),
        batches=[normal(16, 8).astype(dtype)],
    )
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {'q': 16, 'k': 16}


def test_a_parameter_that_a_compiled_helper_hands_on_beside_data_stays_a_parameter():
    helper = jax.jit(lambda x, params: (x / (1 + jnp.abs(x)), params))

    def apply(params, x):
        x, handed = helper(x, {'b': params['b']})
        return jnp.tanh(jnp.tanh(x @ params['a']) @ handed['b']) @ params['c']

    params = {name: normal(8, 8) for name in 'abc'}
    run = sequential.SequentialCalibration(apply, params, [normal(16, 8)])
    for number in range(2):
        run.take(number, params)
    ((part, statistics),) = run.take(2, params | {'b': jnp.zeros((8, 8))})
    assert part.path == ('c',)
    assert not statistics.second_moment.any()


def scan_of_leaves(params, x):
    stack = jnp.concatenate([jnp.stack([params['first'], params['second']]), params['others']])
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def loop_of_leaves(params, x):
    for w in (params['first'], params['second'], *params['others']):
        x = jnp.tanh(x @ w)
    return x


LEAVES = {'first': normal(8, 8), 'second': normal(8, 8), 'others': normal(2, 8, 8)}


@pytest.mark.parametrize('algorithm', ['wanda', 'sparsegpt'])
def test_leaves_that_one_scan_goes_through_are_pruned_as_without_it(algorithm):
    given = {'sparsity': 0.5, 'algorithm': algorithm, 'batches': [normal(32, 8)]}
    found, masks = jaxpruner.prune(LEAVES, apply_fn=scan_of_leaves, **given)
    expected, expected_masks = jaxpruner.prune(LEAVES, apply_fn=loop_of_leaves, **given)
    jax.tree.map(np.testing.assert_array_equal, masks, expected_masks)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_leaves_that_one_scan_goes_through_have_no_order():
    with pytest.raises(
        ValueError,
        match=r'first: a loop goes through this leaf and others, .* leave sequential out',
    ):
        jaxpruner.prune(
            LEAVES, 0.5, 'wanda', apply_fn=scan_of_leaves, batches=[normal(32, 8)], sequential=True
        )


@pytest.mark.parametrize('algorithm', ['wanda', 'ria', 'sparsegpt'])
@pytest.mark.parametrize('value', [jnp.nan, jnp.inf])
def test_batches_that_are_not_finite_are_refused(algorithm, value):
    with pytest.raises(
        ValueError, match='w: its inputs are not finite; look for NaN or inf in the batches'
    ):
        jaxpruner.prune(
            {'w': normal(8, 4)},
            0.5,
            algorithm,
            apply_fn=linear,
            batches=[normal(16, 8).at[0, 0].set(value)],
        )


def test_complex_weights_are_refused():
    weights, x = (normal(*shape) + 1j * normal(*shape) for shape in ((8, 4), (16, 8)))
    with pytest.raises(
        ValueError, match=r'w: what it is multiplied with at .* is complex, which has no rule'
    ):
        calibrate(linear, {'w': weights}, [x], only='w')


@pytest.mark.parametrize('algorithm', ['magnitude', 'wanda', 'sparsegpt', 'synflow'])
def test_numbers_of_python_stay_as_they_are(algorithm):
    given = {} if algorithm == 'magnitude' else {'apply_fn': scaled, 'batches': [normal(16, 8)]}
    pruned, masks = jaxpruner.prune(
        {'w': normal(8, 4), 'scale': 2.0, 'power': 3}, 0.5, algorithm, **given
    )
    assert (pruned['scale'], pruned['power'], masks['scale'], masks['power']) == (
        2.0,
        3,
        None,
        None,
    )
    assert masks['w'].sum() == 16


def scaled(params, x):
    return x @ params['w'] * params['scale']


class Loader:
    """Begins where it was, and does not say so."""

    def __init__(self, batches):
        self.left = iter(batches)

    def __iter__(self):
        return (batch for batch in self.left)


@pytest.mark.parametrize('algorithm', ['wanda', 'snip'])
def test_no_batch_of_what_can_be_read_once_is_lost(algorithm):
    first, second = jnp.zeros((16, 8)).at[:, 0].set(100.0), normal(16, 8) / 100
    params = {'w': jnp.ones((8, 4))}
    given = (
        {'loss_fn': lambda p, x: jnp.mean(linear(p, x))}
        if algorithm == 'snip'
        else {'apply_fn': linear}
    )
    _, masks = jaxpruner.prune(params, 7 / 8, algorithm, batches=Loader([first, second]), **given)
    assert masks['w'][0].all()  # what the first batch is about


class AsTheyAre(Wanda):
    """Returns the weights that it was given."""

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        _, mask = super().prune_matrices(weights, prepared, sparsity, sparsity_type, where)
        return weights, mask


def test_weights_that_are_returned_as_they_were_may_be_given_away():
    pruner = AsTheyAre(sparsity_distribution_fn=lambda params: {'w': 0.5})
    weights, x = normal(8, 4), normal(16, 8)
    expected, _ = pruner.instant_sparsify({'w': weights}, apply_fn=linear, batches=[x])
    pruned, masks = pruner.instant_sparsify(
        {'w': jnp.copy(weights)}, apply_fn=linear, batches=[x], donate=True
    )
    np.testing.assert_array_equal(pruned['w'], expected['w'])
    np.testing.assert_array_equal(pruned['w'], weights * masks['w'])


def test_weights_that_stand_in_two_places_are_refused():
    def tiled(params, x):
        return x @ jnp.tile(params['w'][:4], (2, 1))

    with pytest.raises(ValueError, match='w: a weight of this leaf stands in more than one place'):
        calibrate(tiled, {'w': normal(8, 4)}, [normal(16, 8)])


def test_weights_that_are_computed_with_in_fewer_bits_keep_theirs():
    def narrow(params, x):
        return x.astype(jnp.bfloat16) @ params['w'].astype(jnp.bfloat16)

    weights = normal(8, 4)
    pruner = SparseGPT(sparsity_distribution_fn=lambda params: {'w': 0.0})
    with pytest.warns(UserWarning, match='prunes no leaf .* its target is 0'):
        pruned, _ = pruner.instant_sparsify(
            {'w': weights}, apply_fn=narrow, batches=[normal(32, 8)]
        )
    np.testing.assert_array_equal(pruned['w'], weights)


MASK = np.tri(8, dtype=np.float32)
ORDER = np.array([3, 1, 0, 7, 2, 6, 5, 4])


def scan_of_layers(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params['w'])[0]


def layers_by_a_counter(params, x):
    return jax.lax.fori_loop(0, 3, lambda number, x: jnp.tanh(x @ params['w'][number]), x)


@pytest.mark.parametrize('algorithm', ['wanda', 'ria', 'sparsegpt'])
@pytest.mark.parametrize('in_blocks', [False, True])
def test_layers_that_a_counter_takes_are_pruned_as_those_of_a_scan(algorithm, in_blocks):
    params, given = {'w': normal(3, 8, 8)}, {'batches': [normal(32, 8)], 'sequential': in_blocks}
    found, masks = jaxpruner.prune(params, 0.5, algorithm, apply_fn=layers_by_a_counter, **given)
    expected, expected_masks = jaxpruner.prune(
        params, 0.5, algorithm, apply_fn=scan_of_layers, **given
    )
    jax.tree.map(np.testing.assert_array_equal, masks, expected_masks)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.parametrize('in_blocks', [False, True])
def test_layers_that_a_counter_takes_from_behind_have_the_inputs_that_they_meet(in_blocks):
    def from_behind(params, x):
        return jax.lax.fori_loop(
            0, 3, lambda number, x: jnp.tanh(x @ params['w'][:, 2 - number]), x
        )

    weights, given = normal(3, 8, 8), {'batches': [normal(32, 8)], 'sequential': in_blocks}
    params = {'w': weights[::-1].swapaxes(0, 1)}
    _, masks = jaxpruner.prune(params, 0.5, 'wanda', apply_fn=from_behind, **given)
    _, expected = jaxpruner.prune({'w': weights}, 0.5, 'wanda', apply_fn=scan_of_layers, **given)
    np.testing.assert_array_equal(masks['w'].swapaxes(0, 1)[::-1], expected['w'])


@pytest.mark.parametrize('repeated', [(0, 0), (0, 1, 2, 0)])
def test_layers_that_are_used_twice_are_not_followed(repeated):
    def cycling(params, x):
        return jax.lax.scan(
            lambda x, i: (jnp.tanh(x @ params['w'][i]), None), x, np.array(repeated)
        )[0]

    with pytest.raises(ValueError, match='w: a weight of this leaf stands in more than one place'):
        calibrate(cycling, {'w': normal(3, 8, 8)}, [normal(16, 8)], only='w')


@pytest.mark.parametrize('algorithm', ['wanda', 'ria', 'sparsegpt'])
def test_permuted_weights_are_pruned_by_the_inputs_that_they_meet(algorithm):
    weights, x = normal(8, 4), normal(32, 8) * np.arange(1, 9)
    found, masks = jaxpruner.prune(
        {'w': weights}, 0.5, algorithm, apply_fn=lambda p, x: x @ p['w'][ORDER], batches=[x]
    )
    expected, expected_masks = jaxpruner.prune(
        {'w': weights[ORDER]}, 0.5, algorithm, apply_fn=linear, batches=[x]
    )
    np.testing.assert_array_equal(masks['w'][ORDER], expected_masks['w'])
    np.testing.assert_allclose(found['w'][ORDER], expected['w'], atol=1e-6)


def test_permutations_that_differ_are_not_taken_for_each_other():
    """Their text is the same: NumPy shortens long arrays."""
    order = np.arange(2000)
    other = order.copy()
    other[[900, 1100]] = other[[1100, 900]]
    params = {'w': normal(2000, 1)}
    with pytest.raises(ValueError, match='w: a weight of this leaf stands in more than one place'):
        calibrate(
            lambda p, x: x @ p['w'][order] + x @ p['w'][other], params, [normal(4, 2000)], only='w'
        )


@pytest.mark.parametrize('algorithm', ['wanda', 'sparsegpt'])
@pytest.mark.parametrize(
    'masked', [lambda w: w * MASK, lambda w: jnp.where(MASK > 0, w, 0)], ids=['product', 'where']
)
def test_weights_behind_a_constant_mask_are_pruned_first(algorithm, masked):
    params, x = {'w': normal(8, 8)}, normal(32, 8)
    found, masks = jaxpruner.prune(
        params, 0.75, algorithm, apply_fn=lambda p, x: x @ masked(p['w']), batches=[x]
    )
    assert masks['w'].sum() == 16
    np.testing.assert_array_equal(found['w'] == 0, masks['w'] == 0)
    expected, expected_masks = jaxpruner.prune(
        {'w': params['w'] * MASK}, 0.75, algorithm, apply_fn=linear, batches=[x]
    )
    np.testing.assert_array_equal(masks['w'], expected_masks['w'])
    np.testing.assert_allclose(found['w'] * MASK, expected['w'] * MASK, atol=1e-5)


SIZES = np.array([9, 0, 16, 5])


@pytest.mark.parametrize('algorithm', ['wanda', 'ria', 'sparsegpt'])
def test_experts_that_meet_groups_of_rows_are_pruned_by_their_own_rows(algorithm):
    def experts(params, x):
        return jax.lax.ragged_dot(x, params['w'].swapaxes(1, 2), jnp.asarray(SIZES))

    weights, x = normal(4, 6, 8), normal(32, 8)  # two rows belong to no expert
    with pytest.warns(UserWarning, match='ranked by magnitude|samples are fewer') as seen:
        found, masks = jaxpruner.prune(
            {'w': weights}, 0.5, algorithm, apply_fn=experts, batches=[x]
        )
    few, unseen = (str(warning.message) for warning in seen)
    assert 'w (5 samples, 8 inputs)' in few
    assert ': w, matrix 1;' in unseen
    starts = np.cumsum(SIZES) - SIZES
    for expert in (0, 2):
        rows = x[starts[expert] :][: SIZES[expert]]
        each = {'w': weights[expert].T}
        expected, expected_masks = jaxpruner.prune(
            each, 0.5, algorithm, apply_fn=linear, batches=[rows]
        )
        np.testing.assert_array_equal(masks['w'][expert].T, expected_masks['w'])
        np.testing.assert_allclose(found['w'][expert].T, expected['w'], atol=1e-5)


@pytest.mark.parametrize('kind', ['second_moment', 'gram'])
def test_experts_in_a_scan_of_layers_have_statistics_of_their_own(kind):
    def layers(params, x):
        def layer(x, w):
            return jnp.tanh(jax.lax.ragged_dot(x, w, jnp.array([4, 8]))), x

        return jax.lax.scan(layer, x, params['w'])

    params, x = {'w': normal(3, 2, 8, 8)}, normal(12, 8)
    (entry,) = calibrate(layers, params, [x, x], kind=kind)['w']
    inputs = np.asarray(layers(params, x)[1], np.float64)
    expected = np.stack([2 * (inputs[:, :4] ** 2).sum(1), 2 * (inputs[:, 4:] ** 2).sum(1)], 1)
    np.testing.assert_allclose(entry.statistics.second_moment, expected, rtol=1e-4)
    np.testing.assert_array_equal(entry.statistics.count, [[8, 16]] * 3)
    if kind == 'gram':
        assert entry.statistics.gram.shape == (3, 2, 8, 8)


def test_rows_of_parameters_that_groups_of_data_meet_are_not_followed():
    params = {'rows': normal(6, 8), 'w': normal(8, 8)}

    def apply(params, x):
        return jax.lax.ragged_dot(params['rows'], x @ params['w'], jnp.array([2, 4]))

    with pytest.warns(UserWarning, match='rows: groups of rows at'):
        assert list(calibrate(apply, params, [normal(2, 8, 8)])) == [('w',)]


def test_depthwise_kernels_without_an_axis_of_inputs_stay_dense_with_a_warning():
    def depthwise(params, x):
        kernel = params['w'].reshape(3, 3, 1, 8)
        numbers = ('NHWC', 'HWIO', 'NHWC')
        options = {'dimension_numbers': numbers, 'feature_group_count': 2}
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', **options)

    params = {'w': normal(3, 3, 2, 4)}  # four outputs of each channel
    given = {'apply_fn': depthwise, 'batches': [normal(2, 5, 5, 2)], 'sparsity_type': '2:4'}
    with pytest.warns(UserWarning, match='prunes no leaf of 1|no channels') as seen:
        _, masks = jaxpruner.prune(params, 0.5, 'magnitude', **given)
    reason = 'w: a depthwise convolution sums over no channels'
    assert [reason in str(warning.message) for warning in seen] == [True, True]
    assert masks['w'] is None
