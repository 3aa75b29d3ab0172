"""One call from a model to a smaller one of the same kind, and the kinds that are refused."""

import inspect

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpruner
from jaxpruner import tree
from structure import shrunk_models


def close(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def arrays_of(module):
    """The parameters and the other arrays of an NNX module, as the graph of it has them."""
    params, _, state = nnx.state(module, nnx.Param, nnx.RngState, ...)
    return params, state


def nnx_cnn():
    """A network whose norms have scales and statistics as after a training."""
    model = shrunk_models.CNN(nnx.Rngs(0))
    rng = np.random.default_rng(0)
    arrays = nnx.state((model.norm1, model.norm2))
    drawn = jax.tree.map(lambda leaf: jnp.float32(rng.uniform(0.5, 1.5, leaf.shape)), arrays)
    nnx.update((model.norm1, model.norm2), drawn)
    return model, jax.random.normal(jax.random.key(2), (4, 8, 8, 3))


@nnx.jit
def step(model, optimizer, x):
    def loss_fn(model):
        return ((model(x) - 1) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    takes_model = 'model' in inspect.signature(optimizer.update).parameters
    optimizer.update(*([model, grads] if takes_model else [grads]))
    return loss


def test_an_nnx_network_keeps_its_kind_its_mode_and_its_statistics():
    model, x = nnx_cnn()
    before = jax.tree.map(np.asarray, arrays_of(model))
    small = jaxpruner.shrink(model, x, 'flops=0.5')
    assert type(small.model) is shrunk_models.CNN
    assert small.plan.after.flops <= 0.5 * small.plan.before.flops
    kept = small.keep['conv1/kernel[3]']
    assert kept.size == small.plan.counts['conv1/kernel[3]'] < 8
    close(before, jax.tree.map(np.asarray, arrays_of(model)))
    for each in (model, small.model):
        assert (each.norm1.use_running_average, each.drop.deterministic) == (False, False)
    np.testing.assert_array_equal(small.model.norm1.mean[...], model.norm1.mean[...][kept])
    nnx.update(model, *[small.graph.zeroed(part, small.keep) for part in arrays_of(model)])
    model.eval()
    small.model.eval()
    close(small.model(x), model(x))


def test_an_nnx_network_is_trained_on_with_its_optimizer():
    model, x = nnx_cnn()
    schedule = jaxpruner.OneShotSchedule(1)
    pruner = jaxpruner.MagnitudePruning(sparsity=0.25, scheduler=schedule, use_packed_masks=True)
    optimizer = nnx.Optimizer(model, pruner.wrap_optax(optax.adam(1e-2)), wrt=nnx.Param)
    for _ in range(2):
        step(model, optimizer, x)
    small = jaxpruner.shrink(model, x, 'flops=0.5')
    small_optimizer = small.shrink_state(optimizer)
    assert type(small_optimizer) is nnx.Optimizer
    kept = small.keep['conv1/kernel[3]']
    large, cut = (
        dict(zip(*tree.flatten_with_paths(nnx.state(each))[:2], strict=True))
        for each in (optimizer, small_optimizer)
    )
    (path,) = [path for path in large if path[-3:] == ('mu', 'norm1', 'scale')]
    np.testing.assert_array_equal(cut[path], large[path][kept])
    sizes = [path for path in large if 'sizes' in path]
    assert sizes
    for path in sizes:
        assert cut[path] == getattr(small.model, path[-2]).kernel.size
    if 'model' in vars(small_optimizer):  # of older Flax
        assert small_optimizer.model is small.model
    losses = [step(small.model, small_optimizer, x) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert small.model.norm1.mean.shape == (len(kept),)


# A module, how many channels stay, and the numbers in its layers that follow.
OF_DEPTHWISE = {
    'depthwise.feature_group_count': (8, 4),
    'stem.kernel_shape': ((3, 3, 3, 8), (3, 3, 3, 4)),
}
NUMBERS = [
    (shrunk_models.Depthwise, {'stem/kernel[3]': 4}, OF_DEPTHWISE),
    (shrunk_models.GroupNorm, {'stem/kernel[3][0:8:2]': 3}, {'norm.num_groups': (4, 3)}),
]


@pytest.mark.parametrize(('module', 'counts', 'numbers'), NUMBERS)
def test_layers_of_flax_get_their_new_widths_if_they_need_them(module, counts, numbers):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
    small = jaxpruner.shrink(module(nnx.Rngs(0)), x, counts=counts)
    for path, widths in numbers.items():
        layer, attribute = path.split('.')
        assert small.numbers[path] == widths
        assert getattr(getattr(small.model, layer), attribute) == widths[1]
    params, _ = arrays_of(small.model)
    close(small.model(x), small.graph.small_apply(small.keep)(params, x))
    again = jaxpruner.shrink(small.model, x, counts={'stem/kernel[3]*': 2})
    assert again.numbers.keys() >= numbers.keys()


def test_an_equinox_network_with_statistics():
    def call(module, x, state):
        batched = jax.vmap(module, axis_name='batch', in_axes=(0, None), out_axes=(0, None))
        return batched(x, state)

    model, state = eqx.nn.make_with_state(shrunk_models.EquinoxCNN)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 3, 8, 8))
    _, state = call(model, x, state)
    small = jaxpruner.shrink(model, (x, state), 'flops=0.6', call=call)
    assert not small.numbers
    params, small_state = eqx.filter(small.model, eqx.is_array), small.shrink_state(state)
    found = call(eqx.nn.inference_mode(small.model), x, small_state)
    close(found, small.graph.small_apply(small.keep)(params, small_state, x))


def test_an_equinox_layer_norm_has_a_new_shape():
    keys = jax.random.split(jax.random.key(0))
    layers = [
        eqx.nn.Linear(3, 8, key=keys[0]),
        eqx.nn.LayerNorm(8),
        eqx.nn.Linear(8, 4, key=keys[1]),
    ]
    model = eqx.nn.Sequential(layers)
    settings = {'counts': {'layers/0/weight[0]': 5}, 'call': lambda module, x: jax.vmap(module)(x)}
    small = jaxpruner.shrink(model, jnp.ones((6, 3)), allow_inexact=True, **settings)
    assert small.numbers['layers.1.shape'] == ((8,), (5,))
    assert small.model.layers[1].shape == (5,)
    moments = small.shrink_state({'mu': eqx.filter(model, eqx.is_array)})['mu']
    assert jax.tree.structure(moments) == jax.tree.structure(eqx.filter(small.model, eqx.is_array))


NOT_FOLLOWED = [
    (shrunk_models.Transformer, (2, 5, 3), ['code of Transformer', 'attention.in_features=16']),
    (shrunk_models.Ambiguous, (6, 3), ['TypeError: ', 'width=8', 'cut were up/kernel[1], middle']),
]


@pytest.mark.parametrize(('module', 'shape', 'words'), NOT_FOLLOWED)
def test_modules_whose_code_does_not_follow_are_refused_with_the_numbers_that_they_hold(
    module, shape, words
):
    x = jax.random.normal(jax.random.key(1), shape)
    with pytest.raises(ValueError, match='does not follow') as refusal:
        jaxpruner.shrink(module(nnx.Rngs(0)), x, 'flops=0.6')
    assert all(word in str(refusal.value) for word in words)


def test_heads_of_flax_attention_are_removed():
    x = jax.random.normal(jax.random.key(1), (2, 5, 3))
    counts = {'up/kernel[1]': 12, 'attention/query/kernel[1]': 2}
    small = jaxpruner.shrink(shrunk_models.Transformer(nnx.Rngs(0)), x, counts=counts)
    params, _ = arrays_of(small.model)
    close(small.model(x), small.graph.small_apply(small.keep)(params, x))


LINEN = shrunk_models.LinenCNN()


def linen_apply(variables, x, shift):
    return LINEN.apply(variables, x, train=False) + shift


def test_linen_variables_with_statistics_and_two_inputs():
    x, shift = jax.random.normal(jax.random.key(1), (4, 8, 8, 3)), jnp.ones(4)
    variables = LINEN.init(jax.random.key(0), x, train=False)
    small = jaxpruner.shrink((linen_apply, variables), (x, shift), 'flops=0.5', round_to=2)
    small_apply, small_variables = small.model
    assert small_variables.keys() == variables.keys()
    assert {len(kept) % 2 for kept in small.keep.values()} == {0}
    kept = small.keep['params/Conv_0/kernel[3]']
    assert small_variables['batch_stats']['BatchNorm_0']['var'].shape == kept.shape
    zeroed = small.graph.zeroed(variables, small.keep)
    close(small_apply(small_variables, x[:2], shift), linen_apply(zeroed, x[:2], shift))


def two_layers(params, x):
    return jax.nn.relu(x @ params['up']) @ params['down']


MLP = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
X = jnp.ones((5, 3))
OTHER_KINDS = [
    {'up': jnp.ones((3, 8))},
    LINEN,
    hk.transform(lambda x: x),
    (two_layers, {'up': 1}, {}),
    nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
]


@pytest.mark.parametrize('model', OTHER_KINDS, ids=lambda value: type(value).__name__)
def test_other_kinds_are_refused_with_a_remedy(model):
    remedy = 'got a .*; give .* the pair .apply_fn, params.: with linen lambda variables'
    with pytest.raises(TypeError, match=remedy):
        jaxpruner.shrink(model, X, 'flops=0.5')
    with pytest.raises(TypeError, match=r'a function apply_fn.* with Haiku model\.apply'):
        jaxpruner.channel_groups(model, {'up': jnp.ones((3, 8))}, X)


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match=r"missing before .* shrink\(model, x, 'flops=0\.5'\)"):
        jaxpruner.shrink(MLP, 'flops=0.5')
    with pytest.raises(TypeError, match=r'are a list: .* a tuple, \(x, y\)'):
        jaxpruner.shrink((two_layers, {}), [X], 'flops=0.5')
    with pytest.raises(ValueError, match='give a budget or counts'):
        jaxpruner.shrink(MLP, X[0])
    with pytest.raises(TypeError, match='call is for modules'):
        jaxpruner.shrink((two_layers, {}), X, 'flops=0.5', call=two_layers)
    with pytest.raises(TypeError, match='a function as a pair'):
        jaxpruner.shrink(two_layers, X, 'flops=0.5')
    with pytest.raises(TypeError, match='state'):
        jaxpruner.channel_groups(MLP, X[0], state={'mean': jnp.zeros(8)})
    with pytest.raises(TypeError) as error:
        jaxpruner.shrink(MLP, X, 'flops=0.5')
    assert 'call=lambda module, x: jax.vmap(module)(x)' in '\n'.join(error.value.__notes__)


def test_groups_of_a_module():
    model, x = nnx_cnn()
    graph = jaxpruner.channel_groups(model, x)
    assert graph.groups['conv1/kernel[3]'].in_state[0].name == 'norm1/mean'
    assert graph.choose(nnx.state(model, nnx.Param), 'flops=0.5').keep
    graph = jaxpruner.channel_groups(MLP, X[0])
    assert list(graph.groups) == ['layers/0/weight[0]']
    assert graph.choose(eqx.filter(MLP, eqx.is_array), 'flops=0.7').keep
