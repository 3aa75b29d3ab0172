"""Which constructor arguments make a module of the smaller model's widths, in four libraries."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups, constructor_arguments
from jaxpruner.structure.widths import constructors
from structure import widths
from structure.values import values_like


def halved(graph):
    return {name: np.arange(group.size // 2) for name, group in graph.groups.items()}


@pytest.mark.parametrize(
    ('build', 'arguments', 'expected'), widths.LIBRARIES.values(), ids=widths.LIBRARIES
)
def test_modules_are_built_with_the_arguments_that_are_found(build, arguments, expected):
    apply_fn, shapes = build(**arguments)
    graph = channel_groups(apply_fn, shapes, widths.X)
    params, _ = values_like(shapes, ())
    keep = halved(graph)
    found = constructor_arguments(build, arguments, graph, keep)
    assert found.is_expressible
    assert found.arguments == expected
    numbers = {(float(n.old), float(n.new)) for n in found.old_numbers.numbers}
    assert (16.0, 8.0) in numbers
    apply_small, fresh = build(**found.arguments)
    shrunk = graph.shrink(params, keep, verify=False)
    # Equinox has widths in the structure of the tree.
    small = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(shrunk))
    for leaf, other in zip(jax.tree.leaves(fresh), jax.tree.leaves(small), strict=True):
        assert leaf.shape == other.shape
    result = jax.jit(apply_small)(small, widths.X)
    # It differs from the smaller model by the numbers that are listed, and by nothing else.
    expected_result = jax.jit(graph.small_apply(keep))(shrunk, widths.X)
    difference = float(jnp.abs(result - expected_result).max())
    assert 1e-5 < difference < 0.5 * float(jnp.abs(expected_result).max())


def test_widths_that_no_argument_makes_are_named():
    """Queries get other widths than values, and the module has one argument for both."""
    build, arguments, _ = widths.LIBRARIES['equinox']
    graph = channel_groups(*build(**arguments), widths.X)
    keep = {'attention/value_proj/weight[0][0:8]': [0, 1, 2]}
    found = constructor_arguments(build, arguments, graph, keep)
    assert not found.is_expressible
    assert 'attention/value_proj/weight[0] has' in str(found)
    assert 'no arguments make the smaller model' in str(found)
    assert not found.gave_up


def test_a_search_that_gives_up_says_so(monkeypatch):
    monkeypatch.setattr(constructors, '_MOST_BUILDS', 2)
    config = _Config((4, 6))
    graph = channel_groups(*_build_mlp(config), widths.X)
    found = constructor_arguments(_build_mlp, {'config': config}, graph, halved(graph))
    assert found.gave_up
    assert 'no arguments were found in 2 trials' in str(found)


@dataclasses.dataclass(frozen=True)
class _Config:
    layers: tuple[int, ...]
    ratio: float = 2.0
    bias: bool = True


class _Mlp(nn.Module):
    config: _Config

    @nn.compact
    def __call__(self, x):
        for width in self.config.layers:
            x = x + nn.Dense(x.shape[-1])(jnp.tanh(nn.Dense(width)(x)))
        return nn.Dense(2)(jnp.sin(nn.Dense(int(3 * self.config.ratio), self.config.bias)(x)))


def _build_mlp(config):
    return _Mlp(config).apply, jax.eval_shape(_Mlp(config).init, widths.KEY, widths.X)


def test_numbers_in_configurations_are_changed():
    config = _Config((8, 8))
    graph = channel_groups(*_build_mlp(config), widths.X)
    keep = {'params/Dense_3/kernel[1]': [1, 2, 5], 'params/Dense_5/kernel[1]': [0, 1, 2]}
    found = constructor_arguments(_build_mlp, {'config': config}, graph, keep)
    assert found.arguments == {'config': _Config((8, 3), 1.0)}
    assert str(found).splitlines() == ['config.layers.1: 8 -> 3', 'config.ratio: 2.0 -> 1.0']
    assert not found.old_numbers.numbers


def test_nothing_changes_where_nothing_is_cut():
    config = _Config((4,))
    graph = channel_groups(*_build_mlp(config), widths.X)
    assert str(constructor_arguments(_build_mlp, {'config': config}, graph, {})) == (
        'no argument changes'
    )


def test_arguments_of_another_model_are_refused():
    graph = channel_groups(*_build_mlp(_Config((4,))), widths.X)
    with pytest.raises(ValueError, match=r'Dense_0/kernel\[0\] has 5 in place of 4'):
        constructor_arguments(_build_mlp, {'config': _Config((5,))}, graph, {})
    with pytest.raises(ValueError, match=r'Dense_4/bias is a further leaf'):
        constructor_arguments(_build_mlp, {'config': _Config((4, 4))}, graph, {})
