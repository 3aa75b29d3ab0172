"""Steps in which no mask is due do not pay for masks, also where several trainings run as one under `vmap`.

`lax.cond` would become a select there, which pays for both branches in each step. The mask update is a loop that runs
at most once instead: nothing of it may stand outside, neither as it is traced nor as XLA compiles it.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner
from contract import tables
from helpers import compiling, hlo
from jaxpruner import sparsity_distributions, sparsity_schedules

SEEDS = 3
SHAPES = {'first': (16, 24), 'last': (24, 8)}
SMALLEST = min(math.prod(shape) for shape in SHAPES.values())

SELECT_IN_EVERY_STEP = {name for name, row in tables.ALGORITHMS.items() if row.straight_through}

# Algorithm, sparsity type, whether masks are packed.
CASES = [
    *[
        (name, 'unstructured', False)
        for name in jaxpruner.all_algorithm_names()
        if name not in {'no_prune', 'iterative_nm', *SELECT_IN_EVERY_STEP}
    ],
    *[('magnitude', kind, False) for kind in ('2:4', 'block_4,4', 'channel_-1')],
    ('iterative_nm', '2:4', False),
    ('random', 'unstructured', True),
    ('rigl', 'unstructured', True),
]
# Nothing selects here: masks are there from the start; N:M has no loop of its own.
WITHOUT_INNER_LOOP = {'static_sparse', '2:4'}
# Where the optimizer can be skipped, its updates take the memory of the gradients, which are not given away here.
COPIED = {'set', 'rigl'}

each_case = pytest.mark.parametrize(
    'case', CASES, ids=lambda case: f'{case[0]}-{case[1]}-{"un" * (not case[2])}packed'
)


def transformation(case, seed):
    algorithm, kind, is_packed = case
    settings = {
        'update_freq': 5,
        'update_start_step': 0,
        'update_end_step': 10,
        'drop_fraction': 0.3,
    }
    pruner = jaxpruner.create_updater_from_config(
        {
            'algorithm': algorithm,
            'sparsity_type': kind,
            'use_packed_masks': is_packed,
            'sparsity': 0.5 if kind == '2:4' else 0.75,
            'rng_seed': seed,
            **settings,
        }
    )
    return pruner.wrap_optax(optax.adam(0.1))


def initial_params(seed):
    keys = jax.random.split(jax.random.PRNGKey(seed), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def vmapped_step(case):
    """A step of three trainings with a seed each, and the shapes of its arguments."""

    def init(seed):
        params = initial_params(seed)
        return params, transformation(case, seed).init(params)

    def step(seed, grads, state, params):
        updates, state = transformation(case, seed).update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    seeds = jnp.arange(SEEDS)
    params, state = jax.eval_shape(jax.vmap(init), seeds)
    return jax.vmap(step), (seeds, params, state, params)


# As traced.


def inner_jaxprs(equation):
    """Names and programs of what an operation calls."""
    for name, value in equation.params.items():
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            program = getattr(entry, 'jaxpr', entry)
            if hasattr(program, 'eqns'):
                yield name, program


def equations(jaxpr, follow_loops):
    for equation in jaxpr.eqns:
        yield equation
        for name, program in inner_jaxprs(equation):
            if follow_loops or (equation.primitive.name, name) != ('while', 'body_jaxpr'):
                yield from equations(program, follow_loops)


def selects(equation):
    """Whether an operation belongs to scores, random numbers or a selection; optimizers do without these."""
    if equation.primitive.name in {'ge', 'gt', 'le', 'lt'}:
        # Of floats: bits of packed masks are read by a comparison, too.
        floats = [v for v in equation.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        return any(math.prod(variable.aval.shape) >= SMALLEST for variable in floats)
    names = {
        'abs',
        'sort',
        'top_k',
        'cumsum',
        'reduce',
        'cond',
        'random_bits',
        'random_fold_in',
        'threefry2x32',
        'concatenate',
    }
    return equation.primitive.name in names


@each_case
def test_selection_is_traced_inside_a_loop(case):
    step, arguments = vmapped_step(case)
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    outside = list(equations(jaxpr, follow_loops=False))
    assert [equation for equation in outside if selects(equation)] == []
    loops = [equation for equation in outside if equation.primitive.name == 'while']
    assert len(loops) == 1 + (case[0] in ('set', 'rigl')), (
        'the mask update, and the optimizer where it is skipped'
    )
    (body,) = [program for name, program in inner_jaxprs(loops[0]) if name == 'body_jaxpr']
    inside = [equation.primitive.name for equation in equations(body, follow_loops=True)]
    assert ('while' in inside) is not bool(WITHOUT_INNER_LOOP & set(case))


# As compiled.


def is_large(instruction):
    return any(math.prod(shape) >= SMALLEST for shape in instruction.shapes)


@each_case
def test_selection_is_compiled_inside_a_loop(case):
    step, arguments = vmapped_step(case)
    # State and parameters are donated in training; without that each result is a copy anyway.
    text = compiling.as_written(jax.jit(step, donate_argnums=(2, 3)).lower(*arguments)).as_text()
    outside = hlo.reached(text, follow_loops=False)
    opcodes = collections.Counter(instruction.opcode for instruction in outside)
    assert opcodes['while'] == 1 + (case[0] in ('set', 'rigl'))
    assert not opcodes['reduce-window']
    assert not opcodes.keys() & {'sort', 'abs', 'rng-bit-generator'}
    # JAX 0.12 moves the branch that hides constants out of the loop. It is always taken, so it may hold nothing else.
    branches = {
        name
        for instruction in outside
        if instruction.opcode == 'conditional'
        for names in instruction.called.values()
        for name in names
    }
    in_branches = [i for name in branches for i in hlo.reached(text, name)]
    assert {i.opcode for i in in_branches} <= {'parameter', 'constant', 'copy', 'tuple'}
    assert not any(map(is_large, in_branches))
    # What stood in the body when it was traced says so wherever XLA has moved it.
    moved = [
        i for i in outside if is_large(i) and 'while/body' in i.rest and i.opcode != 'parameter'
    ]
    assert moved == []
    if case[0] not in COPIED:
        assert [i for i in outside if i.opcode == 'copy' and is_large(i)] == []


# As run.


@dataclasses.dataclass
class Observed(jaxpruner.BaseUpdater):
    """Magnitude pruning that calls back whenever scores are computed."""

    on_scores: object = None

    def calculate_scores(self, params, sparse_state=None, grads=None):
        del grads
        jax.debug.callback(self.on_scores, sparse_state.count)
        return jax.tree.map(jnp.abs, params)


def scan_then_vmap(step, starts):
    return jax.vmap(lambda start: jax.lax.scan(step, start, length=10)[0])(starts)


def vmap_then_scan(step, starts):
    return jax.lax.scan(
        lambda carry, _: (jax.vmap(lambda one: step(one, None)[0])(carry), None), starts, length=10
    )[0]


@pytest.mark.parametrize('is_packed', [False, True], ids=['unpacked', 'packed'])
@pytest.mark.parametrize('run', [scan_then_vmap, vmap_then_scan])
def test_scores_are_computed_only_when_due(run, is_packed):
    calls = collections.Counter()
    pruner = Observed(
        scheduler=sparsity_schedules.PeriodicSchedule(update_freq=5),
        sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=0.75),
        use_packed_masks=is_packed,
        on_scores=lambda count: calls.update([int(count)]),
    )
    tx = pruner.wrap_optax(optax.adam(0.1))

    def start(seed):
        params = initial_params(seed)
        return params, tx.init(params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), None

    params, state = jax.jit(functools.partial(run, step))(jax.vmap(start)(jnp.arange(SEEDS)))
    jax.block_until_ready(params)
    jax.effects_barrier()
    # One call for each of the trainings that run as one.
    assert calls == {0: SEEDS, 5: SEEDS}
    assert state.count.tolist() == [10] * SEEDS
    for name, shape in SHAPES.items():
        assert (params[name] != 0).sum((1, 2)).tolist() == [math.prod(shape) // 4] * SEEDS
