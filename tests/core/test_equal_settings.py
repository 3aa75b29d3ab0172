"""Pruners of equal settings are equal, and may be static arguments."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions


@dataclasses.dataclass
class Decorated(jaxpruner.BaseUpdater):
    decay: float = 0.9

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return params


@dataclasses.dataclass(slots=True)
class InSlots(jaxpruner.BaseUpdater):
    decay: float = 0.9


@dataclasses.dataclass
class TwiceDecorated(Decorated):
    rounds: int = 1


class Bare(TwiceDecorated):
    pass


@dataclasses.dataclass
class OwnSchedule:
    def is_mask_update_iter(self, step):
        return False

    def get_sparsity_at_step(self, target_sparsities, step):
        return target_sparsities


def config(algorithm, **settings):
    every = {'update_freq': 2, 'update_start_step': 0, 'update_end_step': 8}
    return jaxpruner.create_updater_from_config({'algorithm': algorithm} | every | settings)


def distribution(**settings):
    return functools.partial(sparsity_distributions.erk, sparsity=0.5, **settings)


# Functions that make a pruner, equal ones each time that they are called.
PRUNERS = {
    'defaults': jaxpruner.MagnitudePruning,
    'another class': jaxpruner.SaliencyPruning,
    'sparsity': lambda: jaxpruner.MagnitudePruning(sparsity=0.5),
    'another sparsity': lambda: jaxpruner.MagnitudePruning(sparsity=0.6),
    'a partial': lambda: jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=distribution(custom_sparsity_map={'a': None, '*': 0.5})
    ),
    'another order of rules': lambda: jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=distribution(custom_sparsity_map={'*': 0.5, 'a': None})
    ),
    'a type': lambda: jaxpruner.MagnitudePruning(sparsity_type='2:4'),
    'types': lambda: jaxpruner.MagnitudePruning(sparsity_type={'a': None, '*': 'block_2,2'}),
    'types in another order': lambda: jaxpruner.MagnitudePruning(
        sparsity_type={'*': 'block_2,2', 'a': None}
    ),
    'a key': lambda: jaxpruner.RandomPruning(rng_seed=jax.random.key(3)),
    'another key': lambda: jaxpruner.RandomPruning(rng_seed=jax.random.key(4)),
    'an old key': lambda: jaxpruner.RandomPruning(rng_seed=jax.random.PRNGKey(3)),
    'a key of NumPy': lambda: jaxpruner.RandomPruning(rng_seed=np.zeros(2, np.uint32)),
    'names': lambda: jaxpruner.MagnitudePruning(stacked=['a', ('b', 'c')]),
    'no names': lambda: jaxpruner.MagnitudePruning(stacked=[]),
    'masks': lambda: jaxpruner.FixedMask({'a': jnp.array([1, 0], jnp.uint8), 'b': None}),
    'other masks': lambda: jaxpruner.FixedMask({'a': jnp.array([0, 1], jnp.uint8), 'b': None}),
    'global': lambda: jaxpruner.GlobalMagnitudePruning(
        sparsity=0.5, custom_sparsity_map={'a': None}
    ),
    'a schedule': lambda: config('magnitude', sparsity=0.5),
    'another schedule': lambda: config('magnitude', sparsity=0.5, initial_sparsity=0.1),
    'RigL': lambda: config('rigl', sparsity=0.5),
    'RigL with another fraction': lambda: config('rigl', sparsity=0.5, drop_fraction=0.3),
    'AC/DC': lambda: config('acdc', sparsity=0.5),
    'Wanda': lambda: config('wanda', sparsity=0.5, owl=True, blocks=[['a', 'b']]),
    'one of your own': Decorated,
    'its setting': lambda: Decorated(decay=0.5),
    'one in slots': InSlots,
    'its slot': lambda: InSlots(decay=0.5),
    'a subclass': TwiceDecorated,
    'one without decorator': Bare,
}


def test_equal_settings_are_equal_and_others_are_not():
    first, second = ({name: make() for name, make in PRUNERS.items()} for _ in range(2))
    for name, pruner in first.items():
        assert [other for other in second if second[other] == pruner] == [name]
        assert hash(pruner) == hash(second[name]) == hash(copy.copy(pruner))
    assert len({*first.values(), *second.values()}) == len(PRUNERS)


@pytest.mark.parametrize('name', ['a partial', 'a key', 'masks', 'RigL', 'its setting'])
def test_a_static_argument_is_traced_once_for_equal_pruners(name):
    traced = []

    @functools.partial(jax.jit, static_argnames='pruner')
    def step(x, pruner):
        traced.append(pruner)
        return x

    for _ in range(2):
        step(1.0, pruner=PRUNERS[name]())
    assert len(traced) == 1


def test_a_setting_that_is_not_hashable_is_named():
    pruner = jaxpruner.MagnitudePruning(OwnSchedule())
    assert pruner == jaxpruner.MagnitudePruning(OwnSchedule())
    with pytest.raises(TypeError, match=r'MagnitudePruning .*scheduler=.*OwnSchedule.*frozen'):
        hash(pruner)


def test_an_equality_of_ones_own_holds():
    class ByRounds(Bare):
        def __eq__(self, other):
            return self.rounds == other.rounds

        def __hash__(self):
            return self.rounds

    class Below(ByRounds):
        pass

    assert Below(decay=0.5, rounds=3) == Below(rounds=3)
    assert hash(Below(rounds=3)) == 3


def test_what_is_traced_is_equal_to_itself_alone():
    def check(sparsity):
        pruner = jaxpruner.MagnitudePruning(sparsity=sparsity)
        assert pruner == copy.copy(pruner)
        assert pruner != jaxpruner.MagnitudePruning(sparsity=sparsity * 1)
        return sparsity

    jax.vmap(check)(jnp.array([0.5, 0.6]))
