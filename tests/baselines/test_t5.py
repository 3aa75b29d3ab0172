import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.baselines.t5 import (
    END,
    Lengths,
    T5Workload,
    Text,
    corrupt,
    noise_mask,
    position_buckets,
)

TINY = {
    'steps': 3,
    'batch_size': 4,
    'model': {'width': 8, 'heads': 2, 'head_width': 4, 'mlp_width': 8, 'layers': 1},
    'task': {'length': 20, 'test_examples': 6},
}


def reference_corruption(tokens, is_noise, vocabulary):
    """Token by token, as the paper describes it."""
    inputs, targets, sentinel, before = [], [], vocabulary, False
    for token, noise in zip(tokens.tolist(), is_noise.tolist(), strict=True):
        if noise and not before:
            sentinel -= 1
            inputs.append(sentinel)
            targets.append(sentinel)
        (targets if noise else inputs).append(token)
        before = noise
    return [*inputs, END], [*targets, END]


SHAPES = [Lengths.of(20, 0.15, 3.0), Lengths.of(60, 0.5, 2.0)]


@pytest.mark.parametrize('lengths', SHAPES, ids=str)
def test_span_corruption_equals_the_reference(lengths):
    tokens = np.random.default_rng(0).integers(2, 90, lengths.text)

    @jax.jit
    @jax.vmap
    def draw(key):
        mask = noise_mask(key, lengths)
        return mask, *corrupt(jnp.asarray(tokens), mask, lengths, 100)

    for mask, inputs, targets in zip(
        *map(np.asarray, draw(jax.random.split(jax.random.key(0), 50))), strict=True
    ):
        assert (inputs.tolist(), targets.tolist()) == reference_corruption(tokens, mask, 100)
        assert mask.sum() == lengths.noise
        assert (np.diff(mask.astype(int), prepend=0) == 1).sum() == lengths.spans
        assert not mask[0]


@pytest.mark.parametrize(('text', 'density'), [(2, 0.15), (10, 0.95)])
def test_lengths_that_do_not_fit_are_refused(text, density):
    with pytest.raises(ValueError, match=f'{text} tokens with noise_density {density}'):
        Lengths.of(text, density, 3.0)


@pytest.mark.parametrize('bidirectional', [True, False])
def test_position_buckets_are_those_of_t5(bidirectional):
    """Against its definition, one pair at a time."""
    buckets = position_buckets(300, bidirectional, 32, 128)
    count = 16 if bidirectional else 32
    for query, key in [(0, 0), (5, 3), (3, 5), (40, 20), (20, 40), (299, 0), (0, 299), (150, 99)]:
        away = abs(query - key) if bidirectional else max(query - key, 0)
        near = count // 2
        far = near + int(
            math.log(max(away, 1) / near + 1e-7) / math.log(128 / near) * (count - near)
        )
        expected = away if away < near else min(far, count - 1)
        assert buckets[query, key] == expected + (16 if bidirectional and key > query else 0)


def test_texts_are_read(tmp_path):
    workload = T5Workload()
    (tmp_path / 'tinyshakespeare.txt').write_bytes(b'abc' * 100)
    data = workload.data(workload.default('data'), tmp_path)
    assert (len(data.train), len(data.test), len(data.symbols)) == (270, 30, 3)
    assert len(workload.data(workload.default('default'), None).train) > 300_000


def test_numbers_that_do_not_fit_are_refused():
    workload = T5Workload()
    text = Text.of(b'abcd' * 100)
    with pytest.raises(ValueError, match='leaves 40 bytes'):
        workload.task(workload.default('default'), text)
    with pytest.raises(ValueError, match=r'model\.vocabulary is 5, but pydoc needs 7'):
        workload.task(
            workload.default('default').updated({**TINY, 'model': {'vocabulary': 5}}), text
        )
