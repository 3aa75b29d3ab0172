"""`HostDriven` in ordinary loops: masks and weights as in steps that decide for themselves, and fast first steps."""

import dataclasses
import functools
import itertools
import logging

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from base_updater.test_host_driven import (
    assert_same,
    every_operation,
    given,
    make_batches,
    make_gradients,
    make_params,
    make_pruner,
    make_step,
    of_loss,
)
from contract import tables
from helpers import eight_devices
from jaxpruner import HostDriven, SparseState, sparsity_schedules

# Those whose masks depend on parameters and state alone.
APART = {
    'no_prune',
    'magnitude',
    'magnitude_ste',
    'random_ste',
    'global_magnitude',
    'static_sparse',
    'adam_fisher',
    'iterative_nm',
}
UPDATED_APART = 'by a program of their own'
IN_STEP = 'in the training step, since '


def plain(opt_state):
    """The state as one whose steps decide for themselves."""
    is_state = lambda node: isinstance(node, SparseState)  # noqa: E731
    return jax.tree.map(
        lambda node: SparseState(*node) if is_state(node) else node, opt_state, is_leaf=is_state
    )


def train(pruner, tx, params, batches, gradients, small_steps=1, check=assert_same):
    """Trains both ways and compares each step; returns the programs that were compiled for the host's."""
    by_host, inside = make_step(tx, gradients), make_step(tx, gradients)
    masks = HostDriven(pruner)
    opt_state = tx.init(params)
    in_graph = params, opt_state
    for i, batch in enumerate(batches):
        opt_state = masks.update(params, opt_state, i // small_steps)
        params, opt_state = by_host(params, opt_state, batch)
        in_graph = inside(*in_graph, batch)
        if (i + 1) % small_steps == 0:  # in the graph, masks wait for the last small step
            check((params, plain(opt_state)), in_graph)
    return by_host._cache_size()


def rows():
    """Each algorithm with each optimizer that it takes; each of the two meets once in fast runs."""
    seen = set()
    names = list(tables.OPTIMIZERS)
    for number, algorithm in enumerate(tables.ALGORITHMS):
        for optimizer in names[number:] + names[:number]:
            if optimizer in tables.ALGORITHMS[algorithm].refuses:
                continue
            is_new = {algorithm, optimizer} - seen
            seen |= {algorithm, optimizer}
            packed = (number + names.index(optimizer)) % 2 == 0
            yield pytest.param(
                algorithm, optimizer, packed, marks=() if is_new else pytest.mark.slow
            )


def assert_close(first, second):
    """Masks are equal, and all else but for the last bits: what stands around the pruner is fused with it."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    assert_same(*(jaxpruner.sparse_states(state)[0].masks for _, state in (first, second)))


@pytest.mark.parametrize(('algorithm', 'optimizer', 'packed'), list(rows()))
def test_one_result_with_every_optimizer(algorithm, optimizer, packed):
    row = tables.OPTIMIZERS[optimizer]
    pruner = make_pruner(algorithm, packed, **row.schedule)
    small_steps = 2 if optimizer == 'multi_steps_outside' else 1
    # XLA of JAX 0.12 computes the learning rate that is injected differently in the two programs.
    check = (
        assert_close if optimizer in ('multi_steps_outside', 'inject_hyperparams') else assert_same
    )
    batches, gradients = make_batches(), of_loss(pruner)
    train(pruner, row.wrap(pruner), make_params(), batches, gradients, small_steps, check)


TYPED = [
    ('magnitude', '2:4'),
    ('magnitude', 'block_4,4'),
    ('magnitude', 'channel_-1'),
    ('magnitude_ste', 'nm_1,4,0'),
    ('magnitude_ste', 'block_4,4'),
    ('rigl', 'block_4,4'),
    ('set', 'channel_-1'),
    ('random_ste', 'channel_-1'),
]


@pytest.mark.parametrize(('algorithm', 'sparsity_type'), TYPED)
def test_one_result_with_every_sparsity_type(algorithm, sparsity_type):
    sparsity = {'sparsity': None} if sparsity_type in tables.N_BY_M else {}
    pruner = make_pruner(algorithm, True, sparsity_type=sparsity_type, **sparsity)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    train(pruner, tx, make_params('bfloat16'), make_gradients('bfloat16'), given)


@pytest.mark.parametrize('algorithm', jaxpruner.all_algorithm_names())
def test_masks_that_need_no_gradient_have_a_program_of_their_own(algorithm, caplog):
    pruner = make_pruner(algorithm, packed=True)
    caplog.set_level(logging.INFO, 'jaxpruner.base_updater.host_driven')
    tx = pruner.wrap_optax(optax.adam(1e-2))
    compiled = train(pruner, tx, make_params(), make_batches(), of_loss(pruner))
    assert compiled == (1 if algorithm in APART else 2)
    said = [record.getMessage() for record in caplog.records]
    if algorithm == 'no_prune':  # has no schedule
        assert not said
    else:
        assert len(said) == 1  # and is traced once
        assert (UPDATED_APART if algorithm in APART else IN_STEP) in said[0]


@dataclasses.dataclass
class ReadsGradients(jaxpruner.BaseUpdater):
    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda param, grad: jnp.abs(param * grad), params, grads)


@dataclasses.dataclass
class TakesTheLoss(jaxpruner.MagnitudePruning):
    def calculate_scores(self, params, sparse_state=None, grads=None, value=1.0):
        return jax.tree.map(lambda param: value * param, params)


@dataclasses.dataclass
class TakesAnything(jaxpruner.MagnitudePruning):
    def update_state(self, sparse_state, params, grads, **extra):
        return super().update_state(sparse_state, params, grads, **extra)


@dataclasses.dataclass
class NeverBringsBack(jaxpruner.MagnitudePruning):
    def update_state(self, sparse_state, params, grads):
        new = super().update_state(sparse_state, params, grads)
        masks = jax.tree.map(jnp.minimum, new.masks, sparse_state.masks)
        return new._replace(masks=masks)


@dataclasses.dataclass
class MasksForward(jaxpruner.MagnitudePruning):
    def pre_forward_update(self, params, opt_state=None, *, sparse_state=None):
        return self.apply_masks(params, opt_state.masks)


@dataclasses.dataclass
class CountsKept(jaxpruner.MagnitudePruning):
    def init_algorithm_state(self, params, target_sparsities):
        return jnp.zeros((), jnp.int32)

    def track(self, sparse_state, params):
        kept = sum(jnp.sum(mask, dtype=jnp.int32) for mask in jax.tree.leaves(sparse_state.masks))
        return sparse_state._replace(algorithm_state=sparse_state.algorithm_state + kept), None


@dataclasses.dataclass
class ResetsEverything(jaxpruner.MagnitudePruning):
    def moments_to_reset(self, old_state, new_state):
        return jax.tree.map(lambda mask: mask == 0, new_state.masks)


@dataclasses.dataclass
class RanksNext(jaxpruner.MagnitudePruning):
    ranks_next_params = True


OF_ONES_OWN = [
    (ReadsGradients, 'it reads the gradients of the step'),
    (TakesTheLoss, 'calculate_scores takes value=1.0'),
    (TakesAnything, 'update_state takes **extra'),
    (NeverBringsBack, 'it reads what it changes'),
    (MasksForward, 'the forward pass reads what it changes'),
    (CountsKept, 'computes in every step'),
    (ResetsEverything, 'it needs the optimizer'),
    (RanksNext, 'it needs the optimizer'),
]


@pytest.mark.parametrize(('algorithm', 'reason'), OF_ONES_OWN)
def test_what_would_be_noticed_stays_in_the_step(algorithm, reason, caplog):
    caplog.set_level(logging.INFO, 'jaxpruner.base_updater.host_driven')
    schedule = sparsity_schedules.PolynomialSchedule(2, 1, 6)
    pruner = algorithm(scheduler=schedule, sparsity=0.75)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    assert train(pruner, tx, make_params(), make_batches(), of_loss(pruner)) == 2
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_the_update_is_compiled_when_it_is_first_due_and_once():
    pruner = make_pruner('magnitude', packed=True)
    tx, params = pruner.wrap_optax(optax.adam(1e-2)), make_params()
    masks, opt_state = HostDriven(pruner), tx.init(params)
    step = make_step(tx, given)
    for i, grads in enumerate(make_gradients()):
        opt_state = masks.update(params, opt_state, i)
        assert len(masks._programs) == (i >= 2)
        params, opt_state = step(params, opt_state, grads)
    (program,) = masks._programs.values()
    assert program.compute._cache_size() == 1


@pytest.mark.parametrize(
    'algorithm', sorted(set(tables.ALGORITHMS) - {'magnitude_ste', 'random_ste', 'movement'})
)
def test_the_first_step_makes_no_masks(algorithm):
    pruner = make_pruner(algorithm, packed=True)
    tx, params = pruner.wrap_optax(optax.adam(1e-2)), make_params()
    opt_state = HostDriven(pruner).update(params, tx.init(params), 0)
    jaxpr = jax.make_jaxpr(tx.update)(params, opt_state, params).jaxpr
    assert {'while', 'cond', 'scan'}.isdisjoint(every_operation(jaxpr))


def test_a_loop_may_leave_the_step_out_change_over_and_be_rolled_back():
    pruner = make_pruner('rigl', packed=True)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    step, masks = make_step(tx, given), HostDriven(pruner)
    params, opt_state = in_graph = make_params(), tx.init(make_params())
    kept = None
    grads = make_gradients()
    for i in [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]:  # from step 3 back to what was kept before step 1
        if i == 1:
            kept = kept or (params, opt_state, in_graph)
            params, opt_state, in_graph = kept
        opt_state = masks.release(opt_state) if i == 5 else masks.update(params, opt_state)
        params, opt_state = step(params, opt_state, grads[i])
        in_graph = step(*in_graph, grads[i])
        assert_same((params, plain(opt_state)), in_graph)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(12)(x)))


def linen(pruner, masks):
    """The masks and weights after training with a `TrainState`; `masks` is None where steps decide."""
    inputs = jnp.linspace(-1, 1, 64).reshape(4, 16)
    variables = Mlp().init(jax.random.key(0), inputs)
    state = train_state.TrainState.create(
        apply_fn=Mlp().apply, params=variables['params'], tx=pruner.wrap_optax(optax.adam(1e-2))
    )

    @jax.jit
    def step(state):
        def loss(params):
            pruned = pruner.pre_forward_update(params, state.opt_state)
            return jnp.mean((state.apply_fn({'params': pruned}, inputs) - 1) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for i in range(8):
        if masks is not None:
            state = state.replace(opt_state=masks.update(state.params, state.opt_state, i))
        state = step(state)
    return state.params, plain(state.opt_state)


def nnx_optimizer(pruner, masks):
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, pruner.wrap_optax(optax.adam(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        graphdef, params = nnx.split(model, nnx.Param)

        def loss(params):
            pruned = pruner.pre_forward_update(params, optimizer.opt_state)
            return jnp.mean((nnx.merge(graphdef, pruned)(batch[0]) - batch[1]) ** 2)

        optimizer.update(model, jax.grad(loss)(params))

    for i, batch in enumerate(make_batches()):
        if masks is not None:
            params = nnx.state(model, nnx.Param)
            optimizer.opt_state = masks.update(params, optimizer.opt_state, i)
        step(model, optimizer, batch)
    (state,) = jaxpruner.sparse_states(optimizer.opt_state)
    return nnx.state(model), plain(state)


def equinox(pruner, masks):
    model = eqx.nn.MLP(16, 8, 12, 1, key=jax.random.key(0))
    tx = pruner.wrap_optax(optax.adam(1e-2))
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate='all')
    def step(model, opt_state, inputs, outputs):
        params, static = eqx.partition(model, eqx.is_array)

        def loss(params):
            pruned = eqx.combine(pruner.pre_forward_update(params, opt_state), static)
            return jnp.mean((jax.vmap(pruned)(inputs) - outputs) ** 2)

        updates, new_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return eqx.apply_updates(model, updates), new_state

    for i, batch in enumerate(make_batches()):
        if masks is not None:
            opt_state = masks.update(eqx.filter(model, eqx.is_array), opt_state, i)
        model, opt_state = step(model, opt_state, *batch)
    return eqx.filter(model, eqx.is_array), plain(opt_state)


@pytest.mark.parametrize(
    'train',
    # With today's signature of `Optimizer.update`, which the oldest versions do not have.
    [linen, equinox, pytest.param(nnx_optimizer, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    'algorithm', ['magnitude', 'rigl', pytest.param('magnitude_ste', marks=pytest.mark.slow)]
)
def test_loops_of_every_framework(train, algorithm):
    pruner = make_pruner(algorithm, packed=True)
    by_host, in_graph = train(pruner, HostDriven(pruner)), train(pruner, None)
    assert_same(jax.tree.leaves(by_host), jax.tree.leaves(in_graph))
    assert float(jaxpruner.sparsity_metrics(by_host[1])['_mask_sparsity']) > 0.5


@pytest.mark.parametrize('algorithm', ['magnitude', 'rigl'])
def test_a_checkpoint_is_that_of_any_training(algorithm, tmp_path):
    """Restored before the step of an update, and right after it, whose state says that it was due."""
    checkpoint = pytest.importorskip('orbax.checkpoint')
    pruner = make_pruner(algorithm, packed=True)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    step, grads = make_step(tx, given), make_gradients()
    in_graph = [(make_params(), tx.init(make_params()))]
    for i in range(len(grads)):
        in_graph.append(step(*in_graph[-1], grads[i]))
    with checkpoint.StandardCheckpointer() as checkpointer:
        masks, (params, opt_state) = HostDriven(pruner), in_graph[0]
        for i in range(len(grads)):
            opt_state = masks.update(params, opt_state, i)
            params, opt_state = step(params, opt_state, grads[i])
            if i not in (1, 2):
                continue
            checkpointer.save(tmp_path / str(i), (params, opt_state))
            checkpointer.wait_until_finished()
            target = jax.eval_shape(lambda: (make_params(), tx.init(make_params())))
            params, opt_state = checkpointer.restore(tmp_path / str(i), target)
            assert_same((params, opt_state), in_graph[i + 1])
            masks = HostDriven(pruner)
    assert_same((params, plain(opt_state)), in_graph[-1])


def test_several_steps_in_one_program():
    """Where no update is due between them."""
    pruner = make_pruner('magnitude', update_freq=4, update_start_step=0, update_end_step=4)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *make_gradients())

    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    params, opt_state = make_params(), tx.init(make_params())
    masks = HostDriven(pruner)
    ends = [0, 1, 4, 5, 8]
    for start, end in itertools.pairwise(ends):
        opt_state = masks.update(params, opt_state, start)
        some = jax.tree.map(lambda leaf: leaf[start:end], grads)  # noqa: B023
        (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), some)
    in_graph, _ = jax.lax.scan(step, (make_params(), tx.init(make_params())), grads)
    assert_same((params, plain(opt_state)), in_graph)


@pytest.mark.parametrize('packed', [False, True], ids=['unpacked', 'packed'])
@pytest.mark.parametrize('algorithm', ['magnitude', 'global_magnitude', 'magnitude_ste', 'rigl'])
def test_trainings_that_run_as_one(algorithm, packed):
    pruner = make_pruner(algorithm, packed)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    factors = jnp.arange(1.0, 4)
    params = jax.vmap(lambda f: jax.tree.map(lambda leaf: f * leaf, make_params()))(factors)
    step = jax.jit(jax.vmap(make_step(tx, given), in_axes=(0, 0, None)))
    masks, opt_state = HostDriven(pruner), jax.vmap(tx.init)(params)
    in_graph = params, opt_state
    for i, grads in enumerate(make_gradients()):
        opt_state = masks.update(params, opt_state, i)
        params, opt_state = step(params, opt_state, grads)
        in_graph = step(*in_graph, grads)
        assert_same(plain(opt_state).masks, in_graph[1].masks)
        assert_close((params, plain(opt_state)), in_graph)


def test_what_is_replaced_may_be_donated():
    pruner = make_pruner('magnitude')
    tx, params = pruner.wrap_optax(optax.adam(1e-2)), make_params()
    for donate in (False, True):
        opt_state = tx.init(params)._replace(count=jnp.int32(2))
        new = HostDriven(pruner, donate=donate).update(params, opt_state)
        assert {mask.is_deleted() for mask in jax.tree.leaves(opt_state.masks)} == {donate}
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, opt_state[1:])))
        assert float(jaxpruner.sparsity_metrics(new)['_mask_sparsity']) > 0.1


def a_state(pruner=None, count=0):
    pruner = pruner or make_pruner('magnitude')
    tx, params = pruner.wrap_optax(optax.sgd(0.1)), make_params()
    return pruner, tx, params, tx.init(params)._replace(count=jnp.int32(count))


def test_steps_that_were_left_out_are_refused():
    pruner, _, params, state = a_state()
    masks = HostDriven(pruner)
    state = masks.update(params, state, 0)
    later = state._replace(count=jnp.int32(5))
    for step in (5, None):
        with pytest.raises(
            ValueError, match=r'masks were due at step 2, .* at step 0 and then at 5'
        ):
            masks.update(params, later, step)
    masks.update(params, plain(later), 5)  # another training


def test_a_step_that_the_state_does_not_count_is_refused():
    pruner, _, params, state = a_state(count=3)
    with pytest.raises(ValueError, match='step=0 was given, and the state has counted 3 steps'):
        HostDriven(pruner).update(params, state, 0)
    masks = HostDriven(pruner)
    state = masks.update(params, state, 3)
    with pytest.raises(ValueError, match='step=4 was given, and the state has counted 3 steps'):
        masks.update(params, state, 4)  # at which masks are due


def test_what_cannot_be_updated_is_refused():
    pruner, tx, params, state = a_state()
    masks = HostDriven(pruner)
    with pytest.raises(
        TypeError, match=r'HostDriven takes a pruner, .* got GradientTransformation'
    ):
        HostDriven(tx)
    with pytest.raises(TypeError, match='outside of jit'):
        jax.jit(masks.update)(params, state)
    with pytest.raises(TypeError, match=r"due must be a bool, .* got 'yes'"):
        masks.update(params, state, due='yes')
    with pytest.raises(ValueError, match='holds those of 0; wrap one optimizer'):
        masks.update(params, optax.sgd(0.1).init(params))
    twice = optax.chain(pruner.wrap_optax(tx), optax.scale(1.0))
    for many in ((state, state), twice.init(params)):
        with pytest.raises(ValueError, match='holds those of 2; wrap one optimizer'):
            masks.update(params, many)
    with pytest.raises(ValueError, match='were split off by split_masks'):
        masks.update(params, jaxpruner.split_masks(state)[0])
    stacked = jax.vmap(tx.init)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params))
    with pytest.raises(ValueError, match=r'at one step, and these are at \[0 1\]'):
        masks.update(params, stacked._replace(count=jnp.arange(2)))


def test_a_decision_that_contradicts_the_state_is_refused():
    pruner, tx, params, state = a_state(make_pruner('saliency'), count=1)
    masks = HostDriven(pruner)
    state = masks.update(params, state)
    assert tx.update(params, state, params, update_masks=False)
    with pytest.raises(ValueError, match=r'update_masks=True contradicts the state, .* False'):
        tx.update(params, state, params, update_masks=True)
    state = masks.update(params, state._replace(count=jnp.int32(2)))
    with pytest.raises(ValueError, match=r'update_masks=False contradicts the state, .* True'):
        tx.update(params, state, params, update_masks=False)


def test_a_rule_of_ones_own_decides():
    half = functools.partial(jaxpruner.MagnitudePruning, sparsity=0.5)
    pruner, _, params, state = a_state(half(sparsity_schedules.HostSchedule()))
    masks = HostDriven(pruner)
    with pytest.raises(ValueError, match='pass update_masks=True or False to update, or due'):
        masks.update(params, state, 0)
    state = masks.update(params, state, 0, due=False)
    assert float(jaxpruner.sparsity_metrics(state)['_mask_sparsity']) == 0
    state = masks.update(params, state._replace(count=jnp.int32(7)), 7, due=np.bool_(True))
    assert float(jaxpruner.sparsity_metrics(state)['_mask_sparsity']) == 0.5


def test_a_schedule_that_never_updates_is_not_silent():
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5)
    tx, params = pruner.wrap_optax(optax.sgd(0.1)), make_params()
    with pytest.warns(UserWarning, match='MagnitudePruning never updates its masks'):
        state = tx.init(params)
    with pytest.raises(AssertionError):
        assert_same(HostDriven(pruner).update(params, state), state)


def test_parameters_that_the_optimizer_sees_otherwise():
    """`optax.flatten` gives the pruner one array, which the loop does not have."""
    pruner = jaxpruner.MagnitudePruning(
        sparsity_schedules.PolynomialSchedule(2, 1, 6), sparsity_distribution_fn=lambda _: 0.75
    )
    tx = optax.flatten(pruner.wrap_optax(optax.adam(1e-2)))
    assert train(pruner, tx, make_params(), make_gradients(), given) == 2


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def check_masks_stay_where_they_are():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))
    for packed in (False, True):
        pruner = make_pruner('magnitude', packed)
        tx = pruner.wrap_optax(optax.adam(1e-2))
        spread = {
            'kernel': NamedSharding(mesh, PartitionSpec('rows', 'columns')),
            'bias': NamedSharding(mesh, PartitionSpec()),
        }
        params = make_params(scale=8)
        sharded = jax.device_put(params, dict.fromkeys(params, spread))
        step, masks = make_step(tx, given), HostDriven(pruner)
        opt_state, alone = tx.init(sharded), (params, tx.init(params))
        for i in range(5):
            before = opt_state.masks
            opt_state = masks.update(sharded, opt_state, i)
            for old, new in zip(*map(jax.tree.leaves, (before, opt_state.masks)), strict=True):
                assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
            grads = jax.tree.map(jnp.sin, alone[0])
            placed = jax.device_put(grads, dict.fromkeys(params, spread))
            sharded, opt_state = step(sharded, opt_state, placed)
            alone = step(*alone, grads)
            assert_same(plain(opt_state).masks, alone[1].masks)
