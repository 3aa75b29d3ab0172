"""What runs outside of `jit` compiles a program for each distinct shape of leaves, however many leaves have it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from contract import tables
from helpers import compiling
from jaxpruner import mask_calculator
from jaxpruner.core import masking

SHAPES = {'query': (16, 16), 'up': (16, 32), 'down': (32, 16), 'values': (16, 24), 'bias': (16,)}
FEW, MANY = 6, 24
SETTINGS = {
    'dist_type': 'uniform',
    'sparsity': 0.5,
    'update_freq': 2,
    'update_start_step': 1,
    'update_end_step': 9,
}


def model(layers):
    generator = np.random.default_rng(layers)
    return {
        f'layer_{i}': {
            name: jnp.asarray(generator.normal(size=shape), jnp.float32)
            for name, shape in SHAPES.items()
        }
        for i in range(layers)
    }


def updater_of(algorithm, **settings):
    if algorithm == 'iterative_nm':
        settings = {'sparsity_type': '2:4'} | settings
    return jaxpruner.create_updater_from_config({'algorithm': algorithm} | SETTINGS | settings)


def state_of(algorithm, params, **settings):
    return updater_of(algorithm, **settings).wrap_optax(optax.adam(0.1)).init(params)


def signs(params):
    return jax.tree.map(lambda leaf: (leaf > 0).astype(jnp.uint8), params)


def scheduled_masks(algorithm):
    """A call of `update_state`, as who updates masks outside of a program makes it."""

    def call(params):
        state = state_of(algorithm, params)._replace(count=jnp.int32(1))
        return updater_of(algorithm).update_state(state, params, params)

    return call


def instant(algorithm, **settings):
    return lambda params: updater_of(algorithm, **settings).instant_sparsify(params, params)


def created_masks(params):
    updater = updater_of('magnitude')
    return updater.create_masks(
        jax.tree.map(jnp.abs, params), updater.get_target_sparsities(params)
    )


def started(params):
    updater = updater_of('static_sparse', use_packed_masks=True)
    return updater.post_gradient_update(params, updater.wrap_optax(optax.adam(0.1)).init(params))


def forward(params):
    return updater_of('magnitude_ste').pre_forward_update(params, state_of('magnitude_ste', params))


ONE_SHOT = sorted(
    set(jaxpruner.all_algorithm_names())
    - {'static_sparse', 'set', 'rigl', 'adam_fisher'}  # these refuse to prune at once
)
CALLS = {
    'create_masks': created_masks,
    'post_gradient_update': started,
    'pre_forward_update': forward,
    'apply_mask': lambda params: masking.apply_mask(params, signs(params)),
    'fixed masks': lambda params: jaxpruner.FixedMask(signs(params)).instant_sparsify(params),
    'masks_from_zeros': jaxpruner.masks_from_zeros,
    'summarize_sparsity': jaxpruner.summarize_sparsity,
    'summarize_intersection': lambda params: jaxpruner.summarize_intersection(
        signs(params), signs(params)
    ),
    'sparsity_metrics': lambda params: jaxpruner.sparsity_metrics(
        state_of('static_sparse', params), params
    ),
    **{f'init of {name}': lambda p, name=name: state_of(name, p) for name in tables.ALGORITHMS},
    'init with packed masks': lambda p: state_of('rigl', p, use_packed_masks=True),
    **{f'update_state of {name}': scheduled_masks(name) for name in ('magnitude', 'set', 'rigl')},
    **{f'instant_sparsify by {name}': instant(name) for name in ONE_SHOT},
    **{
        f'instant_sparsify to {kind}': instant('magnitude', sparsity_type=kind)
        for kind in ('2:4', 'block_4,4', 'channel_-1')
    },
    'instant_sparsify of stacks': instant('magnitude', stacked='*/up'),
}


@pytest.mark.parametrize('name', CALLS)
def test_more_leaves_of_the_same_shapes_take_no_more_programs(name):
    few, many = model(FEW), model(MANY)
    # Leaves draw their numbers with keys of their own, which come from one small program for their number.
    jax.random.split(jax.random.key(0), len(jax.tree.leaves(many)))
    jax.block_until_ready(CALLS[name](few))
    with compiling.Programs() as programs:
        jax.block_until_ready(CALLS[name](many))
    # One ranking over all leaves is one program.
    ranks_jointly = name.startswith('instant_sparsify by global')
    assert programs.number == int(ranks_jointly)


def test_shapes_of_about_one_size_share_the_selection():
    topk = mask_calculator.topk_mask_calculator
    topk(jnp.ones((19, 21)), 0.5)
    with compiling.Programs() as programs:
        topk(jnp.ones((23, 17)), 0.5)
    # The scores are made in the new shape, copied to a buffer, and its mask is given their shape.
    assert programs.number == 3


def test_in_jit_init_is_one_program():
    tx = updater_of('rigl').wrap_optax(optax.adam(0.1))
    params = model(2)
    expected = tx.init(params)
    # What is computed while init is traced may have left the caches of a long process.
    jax.eval_shape(tx.init, params)
    init = jax.jit(tx.init)
    with compiling.Programs() as programs:
        state = init(params)
    assert programs.number == 1
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_programs_are_counted():
    with compiling.Programs() as programs:
        jax.jit(lambda x: x * 17 + 3)(jnp.float32(2))
        jax.jit(lambda x: x * 18 + 3)(jnp.float32(2))
    assert programs.number >= 2
