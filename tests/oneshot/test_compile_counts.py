"""How many programs pruning a model once compiles: no more for more layers that are equal, and none again."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.trace import compiled_once

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 11, 8
COMPILED = '/jax/core/compile/backend_compile_duration'
compiled = []


def _note(event, duration_secs, **_tags):
    if event == COMPILED:
        compiled.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_note)


def _dense(random, inputs, outputs):
    kernel = random.normal(size=(inputs, outputs)) / inputs**0.5
    return {'kernel': jnp.asarray(kernel, jnp.float32), 'bias': jnp.zeros(outputs)}


def _norm():
    return {'scale': jnp.ones(WIDTH), 'bias': jnp.zeros(WIDTH)}


def gpt2(layers):
    random = np.random.default_rng(0)
    blocks = {}
    for number in range(layers):
        blocks[str(number)] = {
            'ln_1': _norm(),
            'attn': {
                'c_attn': _dense(random, WIDTH, 3 * WIDTH),
                'c_proj': _dense(random, WIDTH, WIDTH),
            },
            'ln_2': _norm(),
            'mlp': {
                'c_fc': _dense(random, WIDTH, 4 * WIDTH),
                'c_proj': _dense(random, 4 * WIDTH, WIDTH),
            },
        }
    return {
        'wte': jnp.asarray(random.normal(size=(WORDS, WIDTH)), jnp.float32),
        'wpe': jnp.asarray(random.normal(size=(LENGTH, WIDTH)), jnp.float32),
        'h': blocks,
        'ln_f': _norm(),
    }


def _apply_dense(layer, x):
    return x @ layer['kernel'] + layer['bias']


def _apply_norm(layer, x):
    return jax.nn.standardize(x) * layer['scale'] + layer['bias']


def _attend(layer, x):
    heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
    parts = jnp.split(_apply_dense(layer['c_attn'], x), 3, -1)
    query, key, value = (part.reshape(heads) for part in parts)
    is_earlier = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jnp.where(is_earlier, jnp.einsum('bqhd,bkhd->bhqk', query, key), -jnp.inf)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(weights), value)
    return _apply_dense(layer['c_proj'], mixed.reshape(x.shape))


def apply(params, tokens):
    x = params['wte'][tokens] + params['wpe']
    for block in params['h'].values():
        x = x + _attend(block['attn'], _apply_norm(block['ln_1'], x))
        hidden = jax.nn.gelu(_apply_dense(block['mlp']['c_fc'], _apply_norm(block['ln_2'], x)))
        x = x + _apply_dense(block['mlp']['c_proj'], hidden)
    return _apply_norm(params['ln_f'], x) @ params['wte'].T


def loss(params, tokens):
    return -jax.nn.log_softmax(apply(params, tokens))[..., 0].mean()


BATCHES = [
    jnp.asarray(np.random.default_rng(seed).integers(0, WORDS, (8, LENGTH))) for seed in (1, 2)
]


def _is_kernel_of_block(path, leaf):
    return path[0] == 'h' and leaf.ndim > 1


# The oldest JAX stacks values of more than 16 leaves in several programs: these rank 16 at most.
OF_BLOCKS = {'filter_fn': _is_kernel_of_block}
CASES = {
    'wanda': {'apply_fn': apply},
    'wanda, 2:4': {'apply_fn': apply, 'sparsity_type': '2:4'},
    'wanda with OWL': {'apply_fn': apply, 'owl': True},
    'wanda in blocks': {'apply_fn': apply, 'sequential': True},
    'ria': {'apply_fn': apply},
    'sparsegpt': {'apply_fn': apply},
    'sparsegpt in blocks': {'apply_fn': apply, 'sequential': True},
    'snip': {'loss_fn': loss, **OF_BLOCKS},
    'grasp': {'loss_fn': loss, **OF_BLOCKS},
    'synflow': {'apply_fn': apply, 'rounds': 2, **OF_BLOCKS},
}


# Pruned in blocks, the first and the last layer differ from those between them.
FEWEST_LAYERS = {'wanda in blocks': 3, 'sparsegpt in blocks': 3}


@pytest.fixture
def forget_programs(monkeypatch):
    def forget():
        monkeypatch.setattr(compiled_once, '_executables', collections.OrderedDict())
        jax.clear_caches()

    return forget


def _number_compiled(case, layers):
    algorithm = case.replace(',', '').split()[0]
    params = gpt2(layers)
    compiled.clear()
    jaxpruner.prune(params, 0.5, algorithm, batches=BATCHES, **CASES[case])
    return len(compiled)


# How many programs there are is up to this library: one of each kind tells it of the oldest versions.
FAST = {'wanda', 'sparsegpt in blocks', 'synflow'}


@pytest.mark.parametrize(
    'case',
    [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_more_equal_layers_need_no_more_programs(case, forget_programs):
    layers = FEWEST_LAYERS.get(case, 2)
    forget_programs()
    needed = _number_compiled(case, layers)
    assert needed > 2  # they are counted
    assert _number_compiled(case, layers) == 0
    forget_programs()
    assert _number_compiled(case, layers + 2) == needed
