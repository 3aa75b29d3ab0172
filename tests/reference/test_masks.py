"""Masks are those of the original JaxPruner, case by case (README.md beside this file)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import mask_calculator, sparsity_types

HERE = Path(__file__).parent
CASES = json.loads((HERE / 'masks.json').read_text())
NUMBERS = {'unstructured': 240, 'nm': 192, 'block': 104, 'channel': 36}


@pytest.fixture(scope='module')
def arrays():
    # A dict: an archive reads its file again at every access.
    with np.load(HERE / 'masks.npz') as archive:
        return dict(archive)


def cases_of(kind):
    return [(i, case) for i, case in enumerate(CASES) if case['kind'] == kind]


def sparsity_type(case):
    match case['kind']:
        case 'unstructured':
            return sparsity_types.Unstructured()
        case 'nm':
            return sparsity_types.NByM(case['n'], case['m'], case['axis'])
        case 'block':
            return sparsity_types.Block(tuple(case['block_shape']), case['use_avg_pooling'])
        case 'channel':
            return sparsity_types.Channel(case['axis'])
    raise ValueError(case['kind'])


def our_mask(case, scores):
    topk = mask_calculator.get_topk_fn(sparsity_type(case))
    return np.asarray(topk(jnp.asarray(scores, case['dtype']), case['sparsity']))


def test_the_cases_are_complete():
    assert {kind: len(cases_of(kind)) for kind in NUMBERS} == NUMBERS
    assert len(CASES) == sum(NUMBERS.values()) == 572


@pytest.mark.parametrize('kind', NUMBERS)
def test_masks_are_equal(kind, arrays):
    differing = []
    for i, case in cases_of(kind):
        scores, expected = arrays[f'scores_{i}'], arrays[f'mask_{i}']
        if scores.shape != expected.shape:
            continue  # blocks that the original pads wrongly
        mask = our_mask(case, scores)
        if mask.dtype != np.uint8 or not np.array_equal(mask, expected):
            differing.append((i, case))
    assert differing == []
