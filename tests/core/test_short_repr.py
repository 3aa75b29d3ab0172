"""Updaters are shown in one short line: what differs from the defaults, functions by name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules, sparsity_types
from jaxpruner.core import short_repr

UNIFORM = functools.partial(sparsity_distributions.uniform, sparsity=0.9)
ERK = functools.partial(sparsity_distributions.erk, sparsity=0.8, filter_fn=lambda path, leaf: True)
POLYNOMIAL = sparsity_schedules.PolynomialSchedule(10, 0, 50)


def half(params):
    return jax.tree.map(lambda _: 0.5, params)


@dataclasses.dataclass
class Plain(jaxpruner.MagnitudePruning):
    """As users write subclasses: the decorator would make a `repr` of all fields."""

    temperature: float = 1.0


class Undecorated(Plain):
    """A subclass without the decorator."""


@dataclasses.dataclass
class Mixin:
    """A dataclass whose generated `repr` stands before the updater's."""

    strength: int = 3


@dataclasses.dataclass
class Mixed(Mixin, jaxpruner.MagnitudePruning):
    """Settings of a mixin and of a pruner."""


class MixedUndecorated(Mixin, jaxpruner.MagnitudePruning):
    """The same without the decorator, whose fields would be the mixin's alone."""


@dataclasses.dataclass
class Own(jaxpruner.MagnitudePruning):
    """Shows itself."""

    def __repr__(self):
        return 'mine'


@dataclasses.dataclass
class BelowOwn(Own):
    """Inherits what its base shows."""


class ReprMixin:
    """A written `repr` that stands before the updater's."""

    def __repr__(self):
        return 'of a mixin'


@dataclasses.dataclass
class WithReprMixin(ReprMixin, jaxpruner.MagnitudePruning):
    """Inherits the mixin's."""


LINES = [
    (jaxpruner.MagnitudePruning(), 'MagnitudePruning()'),
    (jaxpruner.NoPruning(), 'NoPruning()'),
    (jaxpruner.RigL(), 'RigL()'),
    (
        jaxpruner.MagnitudePruning(POLYNOMIAL, sparsity_distribution_fn=UNIFORM),
        'MagnitudePruning(scheduler=PolynomialSchedule(10, 0, 50), sparsity_distribution_fn=uniform(sparsity=0.9))',
    ),
    (
        jaxpruner.MagnitudePruning(POLYNOMIAL, sparsity=0.9),
        'MagnitudePruning(sparsity=0.9, scheduler=PolynomialSchedule(10, 0, 50))',
    ),
    (jaxpruner.GlobalMagnitudePruning(sparsity=0.9), 'GlobalMagnitudePruning(sparsity=0.9)'),
    (
        jaxpruner.RigL(sparsity_distribution_fn=ERK, rng_seed=3),
        'RigL(sparsity_distribution_fn=erk(sparsity=0.8, filter_fn=<lambda>), rng_seed=3)',
    ),
    (jaxpruner.RandomPruning(rng_seed=np.zeros(2, np.uint32)), 'RandomPruning(rng_seed=uint32[2])'),
    (jaxpruner.RandomPruning(rng_seed=jax.random.key(0)), 'RandomPruning(rng_seed=key<fry>[])'),
    (
        jaxpruner.SET(drop_fraction_fn=optax.constant_schedule(0.2)),
        'SET(drop_fraction_fn=constant_schedule)',
    ),
    (jaxpruner.MagnitudePruning(sparsity_type='2:4'), 'MagnitudePruning(sparsity_type=NByM(2, 4))'),
    (jaxpruner.MagnitudePruning(is_packed=True), 'MagnitudePruning(use_packed_masks=True)'),
    (jaxpruner.MagnitudePruning(stacked='layers/*'), "MagnitudePruning(stacked='layers/*')"),
    (
        jaxpruner.MagnitudePruning(sparsity_type={'*/kernel': '2:4', '*': None}),
        "MagnitudePruning(sparsity_type={'*/kernel': NByM(2, 4), '*': None})",
    ),
    (
        jaxpruner.FixedMask(masks={'w': jnp.ones((2, 3), jnp.uint8)}),
        "FixedMask(masks={'w': uint8[2,3]})",
    ),
    (Plain(sparsity_distribution_fn=half), 'Plain(sparsity_distribution_fn=half)'),
    (Plain(temperature=0.5), 'Plain(temperature=0.5)'),
    (Undecorated(temperature=0.5), 'Undecorated(temperature=0.5)'),
    (Mixed(strength=4, skip_gradients=True), 'Mixed(skip_gradients=True, strength=4)'),
    (MixedUndecorated(strength=4), 'MixedUndecorated(strength=4)'),
    (Own(), 'mine'),
    (BelowOwn(), 'mine'),
    (WithReprMixin(), 'of a mixin'),
]


@pytest.mark.parametrize(('updater', 'line'), LINES)
def test_settings_that_differ_are_shown(updater, line):
    assert repr(updater) == line


@pytest.mark.parametrize('name', jaxpruner.all_algorithm_names())
def test_every_algorithm_is_one_line(name):
    config = {
        'algorithm': name,
        'sparsity': 0.9,
        'update_freq': 10,
        'update_start_step': 0,
        'update_end_step': 50,
    }
    if name == 'iterative_nm':
        config['sparsity_type'] = '2:4'
    line = repr(jaxpruner.create_updater_from_config(config))
    assert line.startswith(f'{jaxpruner.ALGORITHM_REGISTRY[name].__name__}(')
    assert '\n' not in line
    assert len(line) <= 160
    assert ' at 0x' not in line
    if name != 'no_prune':
        assert '0.9' in line


def test_long_settings_lose_their_middle():
    masks = {f'layer_{i}': jnp.ones((2, 2), jnp.uint8) for i in range(50)}
    line = repr(jaxpruner.FixedMask(masks=masks))
    assert line.startswith("FixedMask(masks={'layer_0': uint8[2,2]")
    assert len(line) < 90


@pytest.mark.parametrize(
    'sparsity', [jnp.float32(0.9), jnp.asarray(0.9, jnp.float16), np.array(0.9)], ids=repr
)
def test_scalars_are_shown_by_value(sparsity):
    assert repr(jaxpruner.MagnitudePruning(sparsity=sparsity)) == 'MagnitudePruning(sparsity=0.9)'


def test_a_copy_shows_no_seed_that_nobody_gave():
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5)
    copy = dataclasses.replace(pruner, use_packed_masks=True)
    assert repr(copy) == 'MagnitudePruning(sparsity=0.5, use_packed_masks=True)'
    assert copy.rng_seed == pruner.rng_seed
    seeded = dataclasses.replace(
        jaxpruner.MagnitudePruning(rng_seed=jax.random.key(8)), use_packed_masks=True
    )
    assert 'rng_seed=key<fry>[]' in repr(seeded)


def test_copies_inside_jit_keep_no_tracer():
    pruners = []

    def program(x):
        pruners.append(dataclasses.replace(jaxpruner.MagnitudePruning(), use_packed_masks=True))
        return x

    jax.jit(program)(1.0)
    assert pruners[0].rng_seed == jax.random.key(8)


def test_values_inside_jit_are_shown_by_shape():
    lines = []

    def program(seed):
        lines.append(repr(jaxpruner.RandomPruning(rng_seed=seed)))
        return seed

    jax.jit(program)(jnp.int32(3))
    assert lines == ['RandomPruning(rng_seed=int32[])']


DESCRIPTIONS = [
    (sparsity_schedules.PolynomialSchedule(10, 0, 50), 'PolynomialSchedule(10, 0, 50)'),
    (sparsity_schedules.PolynomialSchedule(10, 5, 50, power=2), 'PolynomialSchedule(10, 5, 50, 2)'),
    (sparsity_schedules.PeriodicSchedule(10), 'PeriodicSchedule(10)'),
    (sparsity_schedules.NoUpdateSchedule(), 'NoUpdateSchedule()'),
    (sparsity_types.NByM(2, 4, allow_partial=True), 'NByM(2, 4, allow_partial=True)'),
    (sparsity_types.Block((4, 4)), 'Block((4, 4))'),
    (optax.sgd, 'sgd'),
    (object(), 'object()'),
    ((1,), '(1,)'),
    ([UNIFORM, None], '[uniform(sparsity=0.9), None]'),
]


@pytest.mark.parametrize(('value', 'text'), DESCRIPTIONS)
def test_descriptions(value, text):
    assert short_repr.describe(value) == text


@pytest.mark.parametrize(
    'updater',
    [LINES[3][0], LINES[4][0], jaxpruner.MagnitudePruning(sparsity_type='2:4', rng_seed=5)],
)
def test_what_is_shown_can_be_evaluated(updater):
    names = {**vars(sparsity_schedules), **vars(sparsity_types), **vars(jaxpruner)}

    def uniform(**settings):
        return functools.partial(sparsity_distributions.uniform, **settings)

    copy = eval(repr(updater), {**names, 'uniform': uniform})
    assert (copy.scheduler, copy.sparsity_type, copy.rng_seed) == (
        updater.scheduler,
        updater.sparsity_type,
        updater.rng_seed,
    )
    assert repr(copy) == repr(updater)
