"""The code that the deep-dive notebook prints runs as printed, and what it defines trains."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import rows, seed_documents
from jaxpruner import base_updater, sparsity_distributions, sparsity_schedules
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner.algorithms import pruners

pytestmark = seed_documents.needs_documents

STEPS = 6
SPARSITY = 0.75
METHODS = ('wrap_optax', 'init_state', 'update_state', 'post_gradient_update')
# One cell with the licence, two with imports, then these.
DEFINED = [
    [],
    [],
    [],
    ['wrap_optax'],
    ['init_state'],
    ['update_state'],
    ['MagnitudePruning'],
    ['StaticRandomSparse'],
]


def notebook():
    return seed_documents.find('# JaxPruner Deep Dive')


@pytest.fixture(scope='module')
def printed():
    """What stands after all cells have run, in one namespace as in a notebook."""
    # The printed methods stand in modules of the library, and use what those import.
    names = {
        '__name__': 'deep_dive',
        'logging': logging,
        'pruners': pruners,
        'SparseState': base_updater.SparseState,
    }
    for cell in seed_documents.cells(notebook()):
        exec(cell, names)
    # This method stands in the text between the cells.
    for block in seed_documents.python_blocks(notebook()):
        exec(block, names)
    return names


def test_eight_cells_define_what_the_text_says():
    cells = seed_documents.cells(notebook())
    assert len(cells) == 8
    definitions = [
        [line for line in cell.splitlines() if line.startswith(('def ', 'class '))]
        for cell in cells
    ]
    names = [[line.split()[1].partition('(')[0] for line in lines] for lines in definitions]
    assert names == DEFINED
    assert len(seed_documents.python_blocks(notebook())) == 1


def test_cells_run_as_printed(printed):
    assert all(
        callable(printed[name]) for name in (*METHODS, 'MagnitudePruning', 'StaticRandomSparse')
    )
    assert printed['jaxpruner'] is jaxpruner


def settings(is_packed):
    return {
        'scheduler': sparsity_schedules.PolynomialSchedule(2, 0, 4),
        'sparsity_distribution_fn': functools.partial(
            sparsity_distributions.uniform, sparsity=SPARSITY
        ),
        'use_packed_masks': is_packed,
    }


def initial_params():
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    return {
        'first': {'kernel': jax.random.normal(keys[0], (12, 10)), 'bias': jnp.zeros(10)},
        'last': {'kernel': jax.random.normal(keys[1], (10, 3))},
    }


@jax.jit
def gradients(params):
    x = jax.random.normal(jax.random.PRNGKey(1), (8, 12))

    def loss(params):
        hidden = jnp.tanh(x @ params['first']['kernel'] + params['first']['bias'])
        return jnp.mean((hidden @ params['last']['kernel'] - 1) ** 2)

    return jax.grad(loss)(params)


def train(updater, compiled=True):
    """Parameters and state after six steps."""
    tx = updater.wrap_optax(optax.sgd(0.1, momentum=0.9))
    update = jax.jit(tx.update) if compiled else tx.update
    params = initial_params()
    state = tx.init(params)
    params = updater.post_gradient_update(params, state)
    for _ in range(STEPS):
        updates, state = update(gradients(params), state, params)
        params = updater.post_gradient_update(optax.apply_updates(params, updates), state)
    return params, state


@functools.cache
def library_result(name):
    """What ours of the same name gives."""
    return train(getattr(jaxpruner, name)(**settings(False)))


def check(params, state):
    assert int(state.count) == STEPS
    assert state.masks['first']['bias'] is None
    for layer in ('first', 'last'):
        param = params[layer]['kernel']
        mask = sparse_state_lib.unpack_like(state.masks[layer]['kernel'], param.shape)
        assert int(mask.sum()) == round(param.size * (1 - SPARSITY)), layer
        assert np.array_equal(np.asarray(param) != 0, np.asarray(mask) != 0), layer
        assert float(state.target_sparsities[layer]['kernel']) == SPARSITY


def check_equal(result, expected):
    """Same weights and masks, in whichever layout."""
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), result[0], expected[0]
    )
    for layer in ('first', 'last'):
        shape = result[0][layer]['kernel'].shape
        masks = [
            sparse_state_lib.unpack_like(state.masks[layer]['kernel'], shape)
            for _, state in (result, expected)
        ]
        assert np.array_equal(*masks), layer


CLASSES = ['MagnitudePruning', 'StaticRandomSparse']


@pytest.mark.parametrize(
    ('name', 'is_packed', 'compiled'), rows.crossed(CLASSES, [False, True], [False, True])
)
def test_printed_classes_train_as_the_library_s(printed, name, is_packed, compiled):
    result = train(printed[name](**settings(is_packed)), compiled)
    check(*result)
    check_equal(result, library_result(name))


@pytest.mark.parametrize(
    ('name', 'methods', 'is_packed'),
    rows.crossed(
        CLASSES, [METHODS, METHODS[1:], ('init_state',), ('update_state',)], [False, True]
    ),
)
def test_printed_methods_train(printed, name, methods, is_packed):
    """They replace the library's own, all or some of them; packed, they keep masks as one row of bytes."""
    if name == 'StaticRandomSparse':
        methods = tuple(method for method in methods if method != 'update_state')  # it has its own
    namespace = {method: printed[method] for method in methods}
    attached = dataclasses.make_dataclass(
        'Attached', [], bases=(printed[name],), namespace=namespace
    )
    # The printed wrap_optax branches in Python, so that it cannot be compiled.
    result = train(attached(**settings(is_packed)), compiled='wrap_optax' not in methods)
    check(*result)
    check_equal(result, library_result(name))


@pytest.mark.parametrize('is_packed', [False, True], ids=['unpacked', 'packed'])
def test_printed_init_state_packs_flat(printed, is_packed):
    state = printed['init_state'](
        printed['MagnitudePruning'](**settings(is_packed)), initial_params()
    )
    assert state.masks['first']['kernel'].shape == ((15,) if is_packed else (12, 10))


def test_printed_classes_prune_in_one_shot(printed):
    pruned, masks = printed['MagnitudePruning'](**settings(False)).instant_sparsify(
        initial_params()
    )
    assert int(masks['last']['kernel'].sum()) == int((pruned['last']['kernel'] != 0).sum()) == 8
    with pytest.raises(RuntimeError, match='not supported in sparse training'):
        printed['StaticRandomSparse'](**settings(False)).instant_sparsify(initial_params())
