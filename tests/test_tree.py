"""Paths and names of leaves on every kind of container, and maps in which a mask is missing."""

import collections
import dataclasses

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpruner import tree

Pair = collections.namedtuple('Pair', 'kernel bias')
Attention = collections.namedtuple('Attention', 'query key value')
NNX = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
EQUINOX = eqx.filter(eqx.nn.MLP(2, 2, 4, 0, key=jax.random.key(0)), eqx.is_array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: jax.Array
    scale: jax.Array


CONTAINERS = {
    'nested dict': ({'a': {'kernel': 1.0}}, [('a', 'kernel')]),
    'frozen dict': (flax.core.freeze({'a': {'kernel': 1.0}}), [('a', 'kernel')]),
    'integer keys': ({0: 1.0, 1: 2.0}, [('0',), ('1',)]),
    'list and tuple': ((1.0, [2.0]), [('0',), ('1', '0')]),
    'named tuple': (Pair(1.0, 2.0), [('kernel',), ('bias',)]),
    'dataclass': (Layer(1.0, 2.0), [('weight',), ('scale',)]),
    'haiku': ({'mlp/~/linear_0': {'w': 1.0}}, [('mlp/~/linear_0', 'w')]),
    'single array': (jnp.ones(2), [('kernel',)]),
    'a dict entry called value': ({'a': {'value': 1.0}}, [('a', 'value')]),
    'a field called value': (Attention(1.0, 2.0, 3.0), [('query',), ('key',), ('value',)]),
    'nnx, without the box': ({'a': NNX}, [('a', 'bias'), ('a', 'kernel')]),
    'arrays of equinox': (EQUINOX, [('layers', '0', 'weight'), ('layers', '0', 'bias')]),
}


@pytest.mark.parametrize(('container', 'expected'), CONTAINERS.values(), ids=CONTAINERS)
def test_paths(container, expected):
    paths, leaves, treedef = tree.flatten_with_paths(container)
    assert paths == expected
    assert jax.tree.structure(jax.tree.unflatten(treedef, leaves)) == jax.tree.structure(container)


STRUCTURE = jax.tree.structure({'a': {'x': 0, 'y': 0}, 'b': 0})
FITTING = {
    'all there': ({'a': {'x': 1, 'y': 2}, 'b': 3}, [1, 2, 3]),
    'a leaf missing': ({'a': {'x': None, 'y': 2}, 'b': 3}, [None, 2, 3]),
    'a subtree missing': ({'a': None, 'b': 3}, [None, None, 3]),
    "another optimizer's": ({'a': optax.MaskedNode(), 'b': 3}, [None, None, 3]),
    'everything missing': (None, [None, None, None]),
    'another container': (flax.core.freeze({'a': {'x': 1, 'y': None}, 'b': 3}), [1, None, 3]),
}


@pytest.mark.parametrize(('entries', 'expected'), FITTING.values(), ids=FITTING)
def test_entries_are_matched_to_leaves(entries, expected):
    assert tree.leaves_like(STRUCTURE, entries) == expected


MISFITS = [
    ({'a': {'x': 1}, 'b': 2, 'c': 3}, r"it lacks \['a/y'\] and has \['c'\] besides; give one"),
    ({'a': 1, 'b': 2}, r"it lacks \['a/x', 'a/y'\] and has \['a'\] besides"),
    ([1, 2, 3], 'does not fit the structure of the parameters'),
]


@pytest.mark.parametrize(('entries', 'message'), MISFITS)
def test_trees_of_another_structure_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        tree.leaves_like(STRUCTURE, entries)


def test_a_name_with_two_rules_is_refused():
    with pytest.raises(ValueError, match="custom_sparsity_map has two rules for 'a'"):
        tree.read_rules([('a', 0.5), ('a', None)], 'custom_sparsity_map')
