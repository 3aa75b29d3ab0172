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
PADDED_WRONGLY = 24


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


def fits(case, shape):
    """Whether blocks divide the shape, so that the original returns a mask of it."""
    if case['kind'] != 'block':
        return True
    lengths = zip(reversed(shape), reversed(case['block_shape']), strict=False)
    return all(length % block == 0 for length, block in lengths)


def test_the_cases_are_complete():
    assert {kind: len(cases_of(kind)) for kind in NUMBERS} == NUMBERS
    assert len(CASES) == sum(NUMBERS.values()) == 572


@pytest.mark.parametrize('kind', NUMBERS)
def test_masks_are_equal(kind, arrays):
    differing = []
    for i, case in cases_of(kind):
        scores, expected = arrays[f'scores_{i}'], arrays[f'mask_{i}']
        if scores.shape != expected.shape:
            continue  # the next test's
        mask = our_mask(case, scores)
        if mask.dtype != np.uint8 or not np.array_equal(mask, expected):
            differing.append((i, case))
    assert differing == []


def test_partial_blocks_keep_the_shape_that_the_original_lost(arrays):
    """Where the original pads wrongly no mask is right, but shape and number of blocks are known."""
    wrong = [
        (i, case)
        for i, case in enumerate(CASES)
        if arrays[f'scores_{i}'].shape != arrays[f'mask_{i}'].shape
    ]
    assert len(wrong) == PADDED_WRONGLY
    for i, case in wrong:
        scores = arrays[f'scores_{i}']
        assert case['kind'] == 'block'
        assert not fits(case, scores.shape)
        mask = our_mask(case, scores)
        assert mask.shape == scores.shape
        smallest, largest = blocks_of(mask, case['block_shape'])
        assert np.array_equal(smallest, largest), f'case {i}: a block was divided'
        kept = np.round(np.float32(smallest.size) * (1 - np.float32(case['sparsity'])))
        assert smallest.sum() == max(1, kept), f'case {i}: {case}'


def blocks_of(mask, block_shape):
    """The least and the largest mask value of each block, in an array of blocks."""
    height, width = block_shape
    rows, columns = range(0, mask.shape[0], height), range(0, mask.shape[1], width)
    blocks = [[mask[i : i + height, j : j + width] for j in columns] for i in rows]
    return tuple(
        np.array([[reduce(block) for block in row] for row in blocks])
        for reduce in (np.min, np.max)
    )
