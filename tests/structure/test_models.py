"""One table of models, crossed with what must hold of each: its groups, its axes, its zeros, its smaller versions."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import tree
from jaxpruner.structure import channel_groups
from structure import further_models, stateful
from structure.doubles import doubles, in_doubles, keep_of
from structure.values import values_like
from uses import adversarial, models

# Name -> what makes the function, the parameters, the state or `None`, and the inputs.
MODELS = {
    **{name: model.make for name, model in models.MODELS.items()},
    **{name: functools.partial(tuple, model) for name, model in further_models.MODELS.items()},
    **{f'{name} with a state': row.make for name, row in stateful.MODELS.items()},
}
# Parts of them are float32 whatever their inputs are.
IN_SINGLES = frozenset(('linen recurrent',))


class Case(NamedTuple):
    """A model with its graph, and the error that rounding allows. `states` is empty if it has none."""

    name: str
    graph: object
    params: object
    states: list
    inputs: tuple
    tolerance: float

    @property
    def exact(self):
        """The groups that are exact; a test of a model without them is left out."""
        exact = [group for group in self.graph.groups.values() if group.exact]
        if not exact:
            pytest.skip('no group of this model is exact')
        return exact


@pytest.fixture(params=MODELS, scope='module')
def case(request):
    name = request.param
    is_single = name in IN_SINGLES
    with doubles(not is_single):
        apply_fn, params, *states, inputs = MODELS[name]()
        if not states:
            params, inputs = values_like(params, inputs)
        if not is_single:
            params, states, inputs = in_doubles((params, states, inputs))
        graph = channel_groups(
            apply_fn, params, *inputs, **dict(zip(['state'], states, strict=False))
        )
        yield Case(name, graph, params, states, inputs, 1e-4 if is_single else 1e-8)


def expected_groups():
    """Name of a model -> lines of its groups, from the table by hand."""
    expected = {}
    text = (Path(__file__).parent / 'expected_groups.txt').read_text()
    for block in re.split(r'\n(?! )', text.strip().partition('\n\n')[2]):
        name, *lines = block.splitlines()
        expected[name] = [line.strip() for line in lines]
    return expected


EXPECTED = expected_groups()


def test_groups_are_those_of_the_table(case):
    found, in_states = [], {}
    for group in case.graph.groups.values():
        assert bool(group.reason) != group.exact
        lists = [owner.size for owner in group.lists]
        of_lists = ' lists=' + 'x'.join(map(str, lists)) if lists else ''
        inexact = '' if group.exact else ' inexact'
        found.append(f'{group.name} {group.size} {group.parameters}{of_lists}{inexact}')
        places = [f'{member.name}[{member.axis}]' for member in group.in_state]
        in_states[group.name] = places, lists
    if case.states:
        assert in_states == stateful.MODELS[case.name.removesuffix(' with a state')].groups
    else:
        assert found == EXPECTED[case.name]


def test_each_leaf_is_in_a_group_or_pinned_or_unused(case):
    graph = case.graph
    in_groups = {member.path for group in graph.groups.values() for member in group.members}
    pinned = {(each.path, each.axis) for each in graph.pinned}
    pinned_paths = {path for path, _ in pinned}
    paths = tree.flatten_with_paths(case.params)[0]
    assert in_groups | pinned_paths | set(graph.unused) == set(paths)
    assert not set(graph.unused) & (in_groups | pinned_paths)


def some_of(case, seed, has_lists=True):
    """About half of the channels of each exact group; others for each index of a group's owners."""
    rng = np.random.default_rng(seed)
    keep = {}
    for group in case.exact:
        if group.lists and has_lists:
            sizes = [owner.size for owner in group.lists]
            channels = np.broadcast_to(np.arange(group.size), (*sizes, group.size))
            kept = rng.permuted(channels, axis=-1)[..., : (group.size + 1) // 2]
            keep[group.name] = np.sort(kept, axis=-1)
        else:
            keep[group.name] = keep_of(group, 0.5, rng)
    return keep


@pytest.mark.parametrize('has_lists', [False, True])
def test_smaller_models_equal_zeroed_ones(case, has_lists):
    """Until some channels are removed that are not dead for these inputs."""
    if has_lists and not any(group.lists for group in case.exact):
        pytest.skip('no group has lists')
    state = dict(zip(['state'], case.states, strict=False))
    for seed in range(8):
        keep = some_of(case, seed, has_lists)
        verification = case.graph.verify(case.params, keep, *case.inputs, **state)
        assert verification.error <= case.tolerance * verification.change, keep
        if verification.verdict == 'equal':
            return
    raise AssertionError(f'{keep} changes nothing')


def test_costs_are_those_of_the_smaller_program(case):
    """The smaller program is analysed anew: its costs are read off its own shapes."""
    graph = case.graph
    rng = np.random.default_rng(0)
    keep = {name: np.arange(rng.integers(1, g.size)) for name, g in graph.groups.items()}
    cost = graph.cost(keep)
    trees = [case.params, *case.states]
    cut = functools.partial(graph.shrink, keep=keep, allow_inexact=True, verify=False)
    small, *states = [jax.eval_shape(cut, each) for each in trees]
    leaves = jax.tree.leaves(small)
    assert cost.parameters == sum(leaf.size for leaf in leaves)
    assert cost.bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert not keep or cost.parameters < graph.cost().parameters
    small_apply = graph.small_apply(keep, allow_inexact=True)
    state = dict(zip(['state'], states, strict=False))
    assert cost == channel_groups(small_apply, small, *case.inputs, **state).cost()


@pytest.mark.parametrize('model', adversarial.MODELS.values(), ids=adversarial.MODELS)
def test_adversarial_models(model):
    """Inputs are parameters, too, and results are summed to a number: no axis is pinned for them."""
    with doubles():
        params, inputs = in_doubles(values_like(model.params, model.inputs))
        is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs]

        def apply(both):
            params, floats = both
            own = [
                a if is_own else b for a, b, is_own in zip(floats, inputs, is_float, strict=True)
            ]
            return sum(jnp.sum(each) for each in jax.tree.leaves(model.apply_fn(params, *own)))

        both = params, [x if is_own else None for x, is_own in zip(inputs, is_float, strict=True)]
        graph = channel_groups(apply, both)
        rng = np.random.default_rng(0)
        exact = [group for group in graph.groups.values() if group.exact]
        found = graph.verify(both, {group.name: keep_of(group, 0.5, rng) for group in exact})
        assert found.error <= max(1e-8 * found.change, found.rounding)
