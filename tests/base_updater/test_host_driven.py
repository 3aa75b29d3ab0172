"""The host decides when masks are updated: the same result bit by bit, from two programs without a loop."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpruner
from contract import tables
from helpers import compiling, hlo, rows
from jaxpruner import sparsity_distributions, sparsity_schedules

STEPS = 8
WIDTHS = (16, 24, 8)
STRAIGHT_THROUGH = {name for name, row in tables.ALGORITHMS.items() if row.straight_through}
OPTIMIZERS = {
    'momentum': optax.sgd(1e-2, momentum=0.9),
    'adam': optax.adam(1e-2),
    'clip_adamw': optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)),
}
# Masks are updated at steps 2, 4 and 6.
SCHEDULE = {'update_freq': 2, 'update_start_step': 1, 'update_end_step': 6, 'drop_fraction': 0.3}


def make_pruner(algorithm, packed=False, **settings):
    config = {'algorithm': algorithm, 'sparsity': 0.75, 'use_packed_masks': packed} | SCHEDULE
    if algorithm == 'iterative_nm':
        config |= {'sparsity': 0.5, 'sparsity_type': '2:4'}
    return jaxpruner.create_updater_from_config(config | settings)


def make_params(dtype='float32', scale=1):
    random = np.random.default_rng(0)
    first, hidden, last = (width * scale for width in WIDTHS)
    shapes = {
        'a': {'kernel': (first, hidden), 'bias': (hidden,)},
        'b': {'kernel': (hidden, last), 'bias': (last,)},
    }
    draw = lambda shape: jnp.asarray(0.4 * random.normal(size=shape), dtype)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda node: isinstance(node, tuple))


def make_batches(scale=1):
    random = np.random.default_rng(1)
    widths = (WIDTHS[0] * scale, WIDTHS[-1] * scale)
    return [
        tuple(jnp.asarray(random.normal(size=(8, w)), jnp.float32) for w in widths)
        for _ in range(STEPS)
    ]


def make_gradients(dtype='float32'):
    random = np.random.default_rng(2)
    draw = lambda leaf: jnp.asarray(random.normal(size=leaf.shape), dtype)  # noqa: E731
    return [jax.tree.map(draw, make_params()) for _ in range(STEPS)]


def loss(params, batch):
    hidden = jnp.tanh(batch[0] @ params['a']['kernel'] + params['a']['bias'])
    return jnp.mean((hidden @ params['b']['kernel'] + params['b']['bias'] - batch[1]) ** 2)


def make_step(tx, gradients):
    """A jitted step; `gradients(params, opt_state, batch)`."""

    @functools.partial(jax.jit, static_argnames='update_masks')
    def step(params, opt_state, batch, update_masks=None):
        grads = gradients(params, opt_state, batch)
        updates, opt_state = tx.update(grads, opt_state, params, update_masks=update_masks)
        return optax.apply_updates(params, updates), opt_state

    return step


def given(params, opt_state, batch):
    del params, opt_state
    return batch


def of_loss(pruner):
    def gradients(params, opt_state, batch):
        return jax.grad(lambda values: loss(pruner.pre_forward_update(values, opt_state), batch))(
            params
        )

    return gradients


def begin(pruner, tx, params):
    opt_state = tx.init(params)
    return pruner.post_gradient_update(params, opt_state), opt_state


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def assert_one_result(pruner, tx, params, batches, gradients):
    """Both ways agree in each step; the host's compiles two programs."""
    step, inside = make_step(tx, gradients), make_step(tx, gradients)
    by_host = in_graph = begin(pruner, tx, params)
    decided = [pruner.scheduler.is_mask_update_iter(i) for i in range(len(batches))]
    for batch, update_masks in zip(batches, decided, strict=True):
        by_host, in_graph = (
            step(*by_host, batch, update_masks=update_masks),
            inside(*in_graph, batch),
        )
        assert_same(by_host, in_graph)
    assert (
        step._cache_size()
        == len(set(decided))
        == 1 + (pruner.scheduler != sparsity_schedules.NoUpdateSchedule())
    )


def cases():
    """Algorithm, optimizer, whether masks are packed, dtype, where gradients come from; optimizers in rotation.

    Each algorithm meets each value of the three settings, and for some algorithm each two of them meet.
    """
    for number, algorithm in enumerate(jaxpruner.all_algorithm_names()):
        packed = bool(number % 2)
        settings = [(packed, 'float32', 'loss'), (not packed, 'bfloat16', 'given')]
        if algorithm in ('magnitude', 'rigl'):
            settings += [(packed, 'bfloat16', 'loss'), (not packed, 'float32', 'given')]
        for place, setting in enumerate(settings):
            optimizer = list(OPTIMIZERS)[(number + place) % len(OPTIMIZERS)]
            if (algorithm, optimizer) == ('adam_fisher', 'momentum'):  # which needs second moments
                optimizer = 'adam'
            yield pytest.param(
                algorithm, optimizer, *setting, marks=pytest.mark.slow if place else ()
            )


@pytest.mark.parametrize(('algorithm', 'optimizer', 'packed', 'dtype', 'source'), list(cases()))
def test_both_ways_have_one_result(algorithm, optimizer, packed, dtype, source):
    pruner = make_pruner(algorithm, packed)
    tx = pruner.wrap_optax(OPTIMIZERS[optimizer])
    batches, gradients = (
        (make_gradients(dtype), given) if source == 'given' else (make_batches(), of_loss(pruner))
    )
    assert_one_result(pruner, tx, make_params(dtype), batches, gradients)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('is_pruned', [True, False])
def test_optimized_programs_round_alike(is_pruned, optimizer):
    """LLVM joins a product and a sum where it sees both, which it does not across the border of a loop."""
    tx = jaxpruner.RigL(
        scheduler=sparsity_schedules.PeriodicSchedule(update_freq=2, update_start_step=4),
        sparsity_distribution_fn=lambda _: {'w': 0.75 if is_pruned else None},
    ).wrap_optax(OPTIMIZERS[optimizer])
    random = np.random.default_rng(0)
    params, grads = ({'w': jnp.asarray(random.normal(size=4097), jnp.float32)} for _ in range(2))
    step = jax.jit(
        make_step(tx, given), static_argnames='update_masks', compiler_options=compiling.AS_USERS
    )
    silent = contextlib.nullcontext()
    with silent if is_pruned else pytest.warns(UserWarning, match='RigL prunes no leaf'):
        state = tx.init(params)
    assert_same(step(params, state, grads, update_masks=False), step(params, state, grads))


def every_operation(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for entry in value if isinstance(value, (list, tuple)) else [value]:
                program = getattr(entry, 'jaxpr', entry)
                if hasattr(program, 'eqns'):
                    yield from every_operation(program)


@pytest.mark.parametrize('packed', [False, True], ids=['unpacked', 'packed'])
@pytest.mark.parametrize(
    'algorithm',
    [
        name for name in jaxpruner.all_algorithm_names() if name not in STRAIGHT_THROUGH
    ],  # those select in every step
)
def test_hot_update_is_traced_without_control_flow(algorithm, packed):
    tx = make_pruner(algorithm, packed).wrap_optax(optax.adam(1e-2))
    params = make_params()
    update = functools.partial(tx.update, update_masks=False)
    assert {'while', 'cond', 'scan'}.isdisjoint(
        every_operation(jax.make_jaxpr(update)(params, tx.init(params), params).jaxpr)
    )


@pytest.mark.parametrize(
    'algorithm', [name for name in jaxpruner.all_algorithm_names() if name != 'no_prune']
)
def test_mask_update_is_traced_without_a_loop_around_it(algorithm):
    pruner = make_pruner(algorithm)
    marked = optax.stateless(lambda updates, _: jax.tree.map(jnp.cbrt, updates))
    tx, params = pruner.wrap_optax(optax.chain(optax.adam(1e-2), marked)), make_params()
    jaxpr = jax.make_jaxpr(functools.partial(tx.update, update_masks=True))(
        params, tx.init(params), params
    ).jaxpr
    operations = [equation.primitive.name for equation in jaxpr.eqns]
    assert 'while' not in operations
    assert ('cbrt' not in every_operation(jaxpr)) is pruner.skip_gradients


def compiled_step(pruner, scale, packed=False):
    """The hot step, or the dense one, as training loops compile it."""
    inner = optax.adam(1e-2)
    tx = inner if pruner is None else pruner.wrap_optax(inner)
    settings = {} if pruner is None else {'update_masks': False}

    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params, **settings)
        return optax.apply_updates(params, updates), opt_state

    params = jax.eval_shape(functools.partial(make_params, scale=scale))
    arguments = (params, jax.eval_shape(tx.init, params), make_batches(scale)[0])
    return compiling.as_written(jax.jit(step, donate_argnums=(0, 1)).lower(*arguments))


@functools.cache
def temporary_bytes_of_dense_step(scale):
    return compiled_step(None, scale).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    'packed', [pytest.param(False, marks=pytest.mark.slow), True], ids=['unpacked', 'packed']
)
@pytest.mark.parametrize(
    'algorithm', sorted(set(jaxpruner.all_algorithm_names()) - STRAIGHT_THROUGH)
)
def test_hot_step_costs_no_loop_and_no_memory(algorithm, packed):
    more = []
    for scale in (4, 8):
        program = compiled_step(make_pruner(algorithm, packed), scale)
        opcodes = {instruction.opcode for instruction in hlo.reached(program.as_text())}
        assert opcodes.isdisjoint({'while', 'conditional', 'sort'})
        more.append(
            program.memory_analysis().temp_size_in_bytes - temporary_bytes_of_dense_step(scale)
        )
    assert more[1] <= max(more[0], 0)


@pytest.mark.parametrize('skip_gradients', [False, True])
def test_hot_step_hands_the_masks_through(skip_gradients):
    pruner = make_pruner('magnitude', skip_gradients=skip_gradients)
    tx, params = pruner.wrap_optax(optax.adam(1e-2)), make_params()
    state = tx.init(params)
    _, new = tx.update(params, state, params, update_masks=np.bool_(False))
    for left, right in zip(jax.tree.leaves(state.masks), jax.tree.leaves(new.masks), strict=True):
        assert left is right


def test_the_host_overrules_the_schedule():
    pruner = make_pruner('magnitude')
    tx, params = pruner.wrap_optax(optax.sgd(0.1)), make_params()
    assert not pruner.scheduler.is_mask_update_iter(0)
    _, state = jax.jit(functools.partial(tx.update, update_masks=True))(
        params, tx.init(params), params
    )
    assert (
        float(jaxpruner.sparsity_metrics(state._replace(count=0))['a/kernel']) == 0.0
    )  # as scheduled for step 0
    later = tx.init(params)._replace(count=jnp.int32(5))
    _, state = jax.jit(functools.partial(tx.update, update_masks=True))(params, later, params)
    assert float(jaxpruner.sparsity_metrics(state)['a/kernel']) > 0.5
    assert int(state.count) == 6


def test_training_may_change_over_and_be_resumed():
    pruner = make_pruner('rigl', packed=True)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    step = make_step(tx, of_loss(pruner))
    changing = in_graph = begin(pruner, tx, make_params())
    for i, batch in enumerate(make_batches()):
        if 2 <= i < 5:  # the host takes over, counting on from the state
            changing = step(
                *changing,
                batch,
                update_masks=pruner.scheduler.is_mask_update_iter(int(changing[1].count)),
            )
        else:
            changing = step(*changing, batch)
        in_graph = step(*in_graph, batch)
        assert_same(changing, in_graph)


def make_split_steps(tx):
    """As `make_step` with given gradients: the program of most steps, and the one that updates masks."""

    def step(params, rest, masks, grads, update_masks):
        opt_state = jaxpruner.join_masks(rest, masks)
        updates, opt_state = tx.update(grads, opt_state, params, update_masks=update_masks)
        return optax.apply_updates(params, updates), *jaxpruner.split_masks(opt_state)

    def hot_step(*arguments):
        return step(*arguments, update_masks=False)[:2]

    mask_step = functools.partial(step, update_masks=True)
    return jax.jit(hot_step, donate_argnums=(0, 1)), jax.jit(mask_step, donate_argnums=(0, 1, 2))


@pytest.mark.parametrize(
    ('algorithm', 'packed'), rows.crossed(jaxpruner.all_algorithm_names(), [False, True])
)
def test_masks_may_be_an_argument_of_their_own(algorithm, packed):
    pruner = make_pruner(algorithm, packed)
    tx = optax.chain(optax.scale(0.5), pruner.wrap_optax(optax.adam(1e-2)))
    whole_step, (hot_step, mask_step) = make_step(tx, given), make_split_steps(tx)
    params, whole = make_params(), (make_params(), tx.init(make_params()))
    rest, masks = jaxpruner.split_masks(tx.init(params))
    for i, grads in enumerate(make_gradients()):
        due = pruner.scheduler.is_mask_update_iter(i)
        whole = whole_step(*whole, grads, update_masks=due)
        if due:
            params, rest, masks = mask_step(params, rest, masks, grads)
        else:
            params, rest = hot_step(params, rest, masks, grads)
        assert_same((params, jaxpruner.join_masks(rest, masks)), whole)
    assert hot_step._cache_size() == 1
    assert len(masks) == 1
    pruned = 0 if algorithm == 'no_prune' else 0.5
    assert float(jaxpruner.sparsity_metrics(masks)['_mask_sparsity']) >= pruned


@pytest.mark.parametrize('packed', [False, True], ids=['unpacked', 'packed'])
def test_a_step_returns_nothing_that_was_split_off(packed):
    tx = make_pruner('rigl', packed).wrap_optax(optax.adam(1e-2))
    params = make_params()
    rest, masks = jaxpruner.split_masks(tx.init(params))
    hot_step, _ = make_split_steps(tx)
    lowered = hot_step.lower(params, rest, masks, params)
    assert len(jax.tree.leaves(lowered.out_info)) == len(jax.tree.leaves((params, rest)))
    assert {'masks', 'target_sparsities', 'sizes'}.isdisjoint(
        name for name, value in rest._asdict().items() if jax.tree.leaves(value)
    )


def test_masks_of_pruners_inside_one_another_are_split_off_and_joined():
    pruners = [make_pruner('magnitude'), make_pruner('set')]
    tx = optax.chain(
        pruners[0].wrap_optax(pruners[1].wrap_optax(optax.adam(1e-2))),
        pruners[1].wrap_optax(optax.sgd(0.1)),
    )
    state = tx.init(make_params())
    rest, masks = jaxpruner.split_masks(state)
    assert len(masks) == 3
    assert_same(jaxpruner.join_masks(rest, masks), state)
    assert_same(jaxpruner.join_masks(state, ()), state)


def test_a_state_without_its_masks_is_refused():
    pruner = make_pruner('magnitude')
    tx, params = pruner.wrap_optax(optax.sgd(0.1)), make_params()
    rest, masks = jaxpruner.split_masks(tx.init(params))
    uses = {
        'update': lambda: tx.update(params, rest, params),
        'post_gradient_update': lambda: pruner.post_gradient_update(params, rest),
        'sparsity_metrics': lambda: jaxpruner.sparsity_metrics((rest,)),
        'split_masks': lambda: jaxpruner.split_masks(rest),
    }
    for use in uses.values():
        with pytest.raises(
            ValueError,
            match=r'were split off by split_masks; give join_masks\(rest, masks\) instead',
        ):
            use()
    for wrong, given_masks, words in [
        (rest, (), 'lacks: 1, and whose masks are given: 0'),
        (rest, masks * 2, 'lacks: 1, and whose masks are given: 2'),
        (jaxpruner.join_masks(rest, masks), masks, 'lacks: 0, and whose masks are given: 1'),
    ]:
        with pytest.raises(ValueError, match=words):
            jaxpruner.join_masks(wrong, given_masks)
    for wrong in (masks[0], params):
        with pytest.raises(
            TypeError,
            match='masks must be the second result of split_masks, a tuple of SparseState',
        ):
            jaxpruner.join_masks(rest, wrong)
    with pytest.raises(ValueError, match='there is no SparseState in the optimizer state; wrap'):
        jaxpruner.split_masks(optax.adam(1e-3).init(params))


WRONG = [
    (jnp.bool_(True), 'Array'),
    (np.array(True), 'array'),
    (1, 'got 1'),
    ('yes', "got 'yes'"),
]


@pytest.mark.parametrize(('value', 'words'), WRONG, ids=str)
def test_what_is_no_bool_is_refused(value, words):
    tx = make_pruner('magnitude').wrap_optax(optax.sgd(0.1))
    with pytest.raises(TypeError, match='update_masks must be a Python bool, got') as error:
        tx.update(make_params(), tx.init(make_params()), make_params(), update_masks=value)
    assert words in str(error.value)
    assert "static_argnames='update_masks'" in str(error.value)
    assert 'bool(pruner.scheduler.is_mask_update_iter(step))' in str(error.value)


def test_a_traced_decision_is_refused():
    tx = make_pruner('magnitude').wrap_optax(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r'update_masks must be a .*bool, got .*static'):
        jax.jit(tx.update)(make_params(), tx.init(make_params()), make_params(), update_masks=True)


def test_nobody_inside_sees_the_decision():
    def update(updates, state, params=None, **extra):
        assert set(extra) == {'value'}
        return updates, state

    class Own(jaxpruner.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None, **extra):
            assert set(extra) == {'value'}
            return jax.tree.map(jnp.abs, params)

    half = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    own = Own(scheduler=sparsity_schedules.HostSchedule(), sparsity_distribution_fn=half)
    tx, params = own.wrap_optax(inner), make_params()
    _, state = tx.update(params, tx.init(params), params, update_masks=True, value=1)
    assert float(jaxpruner.sparsity_metrics(state)['a/kernel']) == 0.5


def is_kernel(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: 'pruned' if leaf.ndim > 1 else 'dense', params)


AROUND = {
    'chain': lambda pruner: optax.chain(
        optax.clip_by_global_norm(0.5), pruner.wrap_optax(optax.adam(1e-2))
    ),
    'masked': lambda pruner: optax.masked(pruner.wrap_optax(optax.adam(1e-2)), is_kernel),
    'multi_transform': lambda pruner: optax.multi_transform(
        {'pruned': pruner.wrap_optax(optax.adam(1e-2)), 'dense': optax.sgd(1e-2)}, labels
    ),
    'inject_hyperparams': lambda pruner: optax.inject_hyperparams(
        lambda learning_rate: pruner.wrap_optax(optax.sgd(learning_rate))
    )(learning_rate=1e-2),
}


def assert_close(pruner, tx, params, small_steps=1):
    """The masks are equal, and all else but for the last bits.

    What stands before the pruner in one program with it is fused with the optimizer where there is no loop, which
    wants to read it from memory.
    """
    by_host, in_graph = make_step(tx, given), make_step(tx, given)
    first = second = (params, tx.init(params))
    for i, grads in enumerate(make_gradients()):
        first = by_host(
            *first, grads, update_masks=pruner.scheduler.is_mask_update_iter(i // small_steps)
        )
        second = in_graph(*second, grads)
        for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        assert_same(*(jaxpruner.sparse_states(state)[0].masks for _, state in (first, second)))
    assert by_host._cache_size() == 2
    assert int(jaxpruner.sparse_states(first[1])[0].count) == STEPS // small_steps


@pytest.mark.parametrize('name', AROUND)
def test_the_decision_reaches_the_pruner_through(name):
    pruner = make_pruner('magnitude')
    tx, params = AROUND[name](pruner), make_params()
    jaxpr = jax.make_jaxpr(functools.partial(tx.update, update_masks=False))(
        params, tx.init(params), params
    ).jaxpr
    assert 'while' not in every_operation(jaxpr)
    assert_close(pruner, tx, params)


def test_multi_steps_count_whole_steps():
    pruner = make_pruner('magnitude', update_freq=1, update_start_step=1, update_end_step=2)
    tx = optax.MultiSteps(
        pruner.wrap_optax(optax.adam(1e-2)), every_k_schedule=2
    ).gradient_transformation()
    assert_close(pruner, tx, make_params(), small_steps=2)


@pytest.mark.slow  # and with today's signature of `Optimizer.update`
def test_nnx_optimizer_hands_the_decision_on():
    pruner = make_pruner('magnitude')

    def train(by_host):
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, pruner.wrap_optax(optax.adam(1e-2)), wrt=nnx.Param)

        @functools.partial(nnx.jit, static_argnames='update_masks')
        def step(model, optimizer, batch, update_masks=None):
            grads = nnx.grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
            optimizer.update(model, grads, update_masks=update_masks)

        for i, batch in enumerate(make_batches()):
            step(
                model,
                optimizer,
                batch,
                **({'update_masks': pruner.scheduler.is_mask_update_iter(i)} if by_host else {}),
            )
        return nnx.state(model), nnx.state(optimizer)

    assert_same(train(True), train(False))


@pytest.mark.slow
def test_trainings_that_run_as_one():
    pruner = make_pruner('set')
    tx = pruner.wrap_optax(optax.adam(1e-2))
    params = jax.vmap(lambda factor: jax.tree.map(lambda leaf: factor * leaf, make_params()))(
        jnp.arange(1.0, 4)
    )
    state = jax.vmap(tx.init)(params)

    def step(update_masks):
        return jax.jit(jax.vmap(lambda g, s, p: tx.update(g, s, p, update_masks=update_masks)))

    late = state._replace(count=state.count + 2)
    for update_masks, start in ((True, late), (False, state)):
        assert_same(step(update_masks)(params, start, params), step(None)(params, start, params))
