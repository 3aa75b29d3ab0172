"""Sparsities of leaves are those of the original JaxPruner (README.md beside this file)."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpruner import sparsity_distributions

CASES = json.loads((Path(__file__).parent / 'distributions.json').read_text())
DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}


def nested(flat):
    """`{'a/b': x}` as `{'a': {'b': x}}`."""
    tree = {}
    for name, value in flat.items():
        *parents, last = name.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def flattened(tree, prefix=''):
    """The way back; unlike `jax.tree`, it sees `None`."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    entries = {}
    for name, value in tree.items():
        entries |= flattened(value, f'{prefix}{name}/')
    return entries


def test_the_cases_are_complete():
    assert len(CASES) == 80
    assert {case['distribution'] for case in CASES} == DISTRIBUTIONS.keys()


@pytest.mark.parametrize(
    'case', CASES, ids=lambda case: f'{case["model"]}-{case["distribution"]}-{case["sparsity"]}'
)
def test_sparsities_are_equal(case):
    shapes = {
        name: jax.ShapeDtypeStruct(tuple(shape), np.float32)
        for name, shape in case['shapes'].items()
    }
    custom = case['custom_sparsity_map'] and {
        tuple(name.split('/')): sparsity for name, sparsity in case['custom_sparsity_map'].items()
    }
    distribution = DISTRIBUTIONS[case['distribution']]
    result = flattened(distribution(nested(shapes), case['sparsity'], custom_sparsity_map=custom))
    assert result.keys() == case['result'].keys()
    dense = {name for name, sparsity in case['result'].items() if sparsity is None}
    assert {name for name, sparsity in result.items() if sparsity is None} == dense
    for name in result.keys() - dense:
        assert result[name] == pytest.approx(case['result'][name], abs=1e-6), name
