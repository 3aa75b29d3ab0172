"""One call from a model to a smaller one of the same kind, and the kinds that are refused."""

import inspect
import re

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


def mapped(module, x):
    return jax.vmap(module)(x)


def nnx_cnn():
    """A network whose norms have scales and statistics as after a training."""
    model = shrunk_models.CNN(nnx.Rngs(0))
    rng = np.random.default_rng(0)
    arrays = nnx.state((model.norm1, model.norm2))
    nnx.update(
        (model.norm1, model.norm2),
        jax.tree.map(
            lambda leaf: jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype), arrays
        ),
    )
    return model, jax.random.normal(jax.random.key(2), (4, 8, 8, 3))


def flat_arrays(module):
    """Path -> array, of everything that an NNX object holds."""
    names, leaves, _ = tree.flatten_with_paths(nnx.state(module))
    return dict(zip(names, leaves, strict=True))


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
    large, cut = flat_arrays(optimizer), flat_arrays(small_optimizer)
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


@pytest.mark.parametrize(
    ('module', 'counts', 'numbers'),
    [
        (
            shrunk_models.Depthwise,
            {'stem/kernel[3]': 4},
            {
                'depthwise.feature_group_count': (8, 4),
                'stem.kernel_shape': ((3, 3, 3, 8), (3, 3, 3, 4)),
            },
        ),
        (shrunk_models.GroupNorm, {'stem/kernel[3][0:8:2]': 3}, {'norm.num_groups': (4, 3)}),
    ],
    ids=['depthwise', 'group norm'],
)
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
    model = shrunk_models.EquinoxNormed(jax.random.key(0))
    settings = {'counts': {'up/weight[0]': 5}, 'call': mapped}
    small = jaxpruner.shrink(model, jnp.ones((6, 3)), allow_inexact=True, **settings)
    assert small.numbers['norm.shape'] == ((8,), (5,))
    assert small.model.norm.shape == (5,)
    moments = small.shrink_state({'mu': eqx.filter(model, eqx.is_array)})['mu']
    assert jax.tree.structure(moments) == jax.tree.structure(eqx.filter(small.model, eqx.is_array))


@pytest.mark.parametrize(
    ('module', 'shape', 'settings', 'words'),
    [
        (
            shrunk_models.Transformer,
            (2, 5, 3),
            {'budget': 'flops=0.6'},
            ['code of Transformer', 'attention.in_features=16', 'embed/kernel[1]'],
        ),
        (
            shrunk_models.Ambiguous,
            (6, 3),
            {'budget': 'flops=0.6'},
            ['TypeError: ', 'width=8', 'cut were up/kernel[1], middle/kernel[1]'],
        ),
        (
            shrunk_models.EquinoxAttention,
            (2, 5, 8),
            {'counts': {'*[0:8:2]': 3}, 'call': mapped},
            ['attention.num_heads=4'],
        ),
    ],
    ids=lambda value: getattr(value, '__name__', ''),
)
def test_modules_whose_code_does_not_follow_are_refused_with_the_numbers_that_they_hold(
    module, shape, settings, words
):
    model = module(nnx.Rngs(0) if issubclass(module, nnx.Module) else jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), shape)
    with pytest.raises(ValueError, match='does not follow') as refusal:
        jaxpruner.shrink(model, x, **settings)
    for word in words:
        assert word in str(refusal.value)


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
    (count,) = {len(kept) % 2 for kept in small.keep.values()}
    assert count == 0
    kept = small.keep['params/Conv_0/kernel[3]']
    assert small_variables['batch_stats']['BatchNorm_0']['var'].shape == kept.shape
    zeroed = small.graph.zeroed(variables, small.keep)
    close(small_apply(small_variables, x[:2], shift), linen_apply(zeroed, x[:2], shift))


def two_layers(params, x):
    return jax.nn.relu(x @ params['up']) @ params['down']


def test_a_function_and_its_parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {'up': jax.random.normal(keys[0], (3, 8)), 'down': jax.random.normal(keys[1], (8, 2))}
    x = jax.random.normal(keys[2], (5, 3))
    small_apply, small_params = jaxpruner.shrink((two_layers, params), x, counts={'up[1]': 3}).model
    assert small_params['up'].shape == (3, 3)
    close(small_apply(small_params, x), two_layers(small_params, x))


MLP = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
X = jnp.ones((5, 3))


@pytest.mark.parametrize(
    'model',
    [
        {'up': jnp.ones((3, 8))},
        two_layers,
        LINEN,
        hk.transform(lambda x: x),
        (two_layers, {'up': 1}, {}),
        nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_kinds_are_refused_with_a_remedy(model):
    remedy = 'pair .apply_fn, params., got .*; with linen apply_fn is lambda variables'
    with pytest.raises(TypeError, match=remedy):
        jaxpruner.shrink(model, X, 'flops=0.5')
    if model is not two_layers:
        with pytest.raises(TypeError, match=r'takes a function apply_fn.* with Haiku model\.apply'):
            jaxpruner.channel_groups(model, {'up': jnp.ones((3, 8))}, X)


@pytest.mark.parametrize(
    ('arguments', 'settings', 'words'),
    [
        ((MLP, X[0]), {}, 'give either a budget or counts'),
        (((two_layers, {}), X, 'flops=0.5'), {'call': two_layers}, 'call is for modules'),
        ((MLP, jax.ShapeDtypeStruct((3,), jnp.float32), 'flops=0.5'), {}, 'inputs'),
    ],
    ids=['no budget', 'call', 'shapes'],
)
def test_arguments_that_do_not_fit(arguments, settings, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        jaxpruner.shrink(*arguments, **settings)


def test_a_batch_for_an_equinox_module_is_explained():
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


def test_a_state_beside_a_module_is_refused():
    with pytest.raises(TypeError, match='state'):
        jaxpruner.channel_groups(MLP, X[0], state={'mean': jnp.zeros(8)})
