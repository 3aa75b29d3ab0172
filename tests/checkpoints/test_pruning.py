"""A checkpoint is pruned tensor by tensor: masks are the library's, and all else stays as it is."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors

from jaxpruner import mask_calculator, sparsity_types
from jaxpruner.checkpoints import Choice, Leaf, choose, open_checkpoint, prune, write_safetensors
from jaxpruner.checkpoints.reading import INDEX_NAME
from jaxpruner.checkpoints.writing import write_tensors
from jaxpruner.files import atomic_files
from structure.doubles import doubles

RNG = np.random.default_rng(0)
BFLOAT16 = ml_dtypes.bfloat16


def normal(shape, dtype=np.float32):
    return np.asarray(RNG.standard_normal(shape)).astype(dtype)


class ByLargest(sparsity_types.Channel):
    """A type of one's own: ranks channels by their largest weight."""

    def group_scores(self, scores):
        return scores.max(axis=0)


LEAVES = {  # name: array, sparsity type
    'a': (normal((12, 10), BFLOAT16), 'unstructured'),
    'b': (normal((0, 4)), 'unstructured'),
    'c': (1 + np.arange(8) * 1e-12, 'unstructured'),  # told apart in 64 bits alone
    'd': (normal((6, 12), BFLOAT16), '2:4'),
    'e': (np.ascontiguousarray((1 + np.arange(8) * 1e-12)[::-1]), '2:4'),
    'f': (normal((11, 10), BFLOAT16), 'block_2,3'),
    'g': (normal((4, 6, 5), np.float64), 'channel_1'),
    'h': (normal((6, 8)), ByLargest(-1)),
}


def test_masks_are_those_of_the_library(tmp_path):
    write_safetensors(tmp_path / 'dense', {name: array for name, (array, _) in LEAVES.items()})
    parse = sparsity_types.parse_sparsity_type
    choices = {
        name: Choice(0.4, parse(kind) if isinstance(kind, str) else kind)
        for name, (_, kind) in LEAVES.items()
    }
    prune(open_checkpoint(tmp_path / 'dense'), tmp_path / 'out', choices)
    out = open_checkpoint(tmp_path / 'out')
    for name, (array, _) in LEAVES.items():
        expected = np.ones(array.shape, np.uint8)
        if array.size:
            with doubles():
                mask_fn = mask_calculator.get_topk_fn(choices[name].kind)
                expected = np.asarray(mask_fn(np.abs(array), 0.4))
        expected = np.where(expected, array, np.zeros((), array.dtype))
        np.testing.assert_array_equal(out.read(name), expected, strict=True)


TENSORS = {
    'z.weight': normal((16, 8), BFLOAT16),
    'a.weight': normal((8, 8), np.float16),
    'a.bias': normal(8),
    'ids': RNG.integers(0, 9, (4, 4)),
    'fp8': normal((4, 4)).astype(ml_dtypes.float8_e4m3fn),
    'wide': normal((4, 4), np.float64),
}


@pytest.fixture
def dense(tmp_path):
    write_safetensors(tmp_path / 'dense.safetensors', TENSORS, {'format': 'pt', 'ä': 'ö'})
    return open_checkpoint(tmp_path / 'dense.safetensors')


def test_all_that_is_not_pruned_stays_as_it_is(dense, tmp_path):
    kept = prune(dense, tmp_path / 'out', choose(dense.leaves, 0.5))
    assert kept == {'z.weight': 64, 'a.weight': 32, 'wide': 8}
    out = open_checkpoint(tmp_path / 'out')
    assert (out.metadata, list(out.leaves.items())) == (dense.metadata, list(dense.leaves.items()))
    for name, array in TENSORS.items():
        found = out.read(name)
        expected = np.where(found != 0, array, np.zeros((), array.dtype)) if name in kept else array
        assert found.tobytes() == expected.tobytes()
    with safetensors.safe_open(tmp_path / 'out', 'numpy') as opened:
        assert opened.metadata() == dict(dense.metadata)
    assert sorted(file.name for file in tmp_path.iterdir()) == ['dense.safetensors', 'out']


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / 'dense'
    folder.mkdir()
    write_safetensors(folder / 'one.safetensors', {'a': TENSORS['a.weight']}, {'shard': '1'})
    write_safetensors(folder / 'two.safetensors', {'b': TENSORS['z.weight'], 'c': TENSORS['ids']})
    weight_map = {'a': 'one.safetensors', 'b': 'two.safetensors', 'c': 'two.safetensors'}
    (folder / INDEX_NAME).write_text(json.dumps({'weight_map': weight_map}))
    return open_checkpoint(folder)


def test_shards_become_shards(shards, tmp_path):
    out = tmp_path / 'out'
    choices = choose(shards.leaves, 0.75)
    prune(shards, out, choices)
    pruned = open_checkpoint(out)
    assert pruned.leaves == shards.leaves
    assert {name: np.count_nonzero(pruned.read(name).astype(float)) for name in 'ab'} == {
        'a': 16,
        'b': 32,
    }
    with pytest.raises(FileExistsError, match=r'out exists; choose another name'):
        prune(shards, out, choices, overwrite=True)


def test_an_interrupted_run_leaves_nothing_behind(dense, shards, tmp_path, monkeypatch):
    for checkpoint in (dense, shards):
        read = checkpoint.read

        def interrupt(name, read=read):
            if name in ('fp8', 'c'):
                raise KeyboardInterrupt
            return read(name)

        monkeypatch.setattr(checkpoint, 'read', interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(checkpoint, tmp_path / 'out', choose(checkpoint.leaves, 0.5))
    assert sorted(file.name for file in tmp_path.iterdir()) == ['dense', 'dense.safetensors']


def test_a_file_may_be_pruned_in_its_place(dense):
    choices = choose(dense.leaves, 0.5)
    with pytest.raises(FileExistsError, match=r'dense\.safetensors exists; choose .*overwrite'):
        prune(dense, dense.path, choices)
    with pytest.raises(FileNotFoundError, match='missing'):
        prune(dense, dense.path.parent / 'missing' / 'out', choices)
    prune(dense, dense.path, choices, overwrite=True)
    assert np.count_nonzero(open_checkpoint(dense.path).read('wide')) == 8


def test_nan_is_named(tmp_path):
    tensors = {
        'a': np.full((2, 4), np.nan, np.float32),
        'b': np.array([[1.0, np.nan]]),
        'c': np.ones((2, 2)),
    }
    write_safetensors(tmp_path / 'dense', tensors)
    dense = open_checkpoint(tmp_path / 'dense')
    with pytest.warns(UserWarning, match=r'NaN in a, b: NaN ranks lowest'):
        prune(dense, tmp_path / 'out', choose(dense.leaves, 0.5))


@pytest.mark.parametrize('source', ['dense', 'shards'])
def test_runs_into_one_target_do_not_mix_and_what_a_killed_one_left_is_removed(
    source, request, tmp_path
):
    checkpoint, out = request.getfixturevalue(source), tmp_path / 'out'
    (tmp_path / '.out.0123456789abcdef.jaxpruner-tmp').write_text('half')
    choices = choose(checkpoint.leaves, 0.5)
    words = 'another process is writing'
    with atomic_files.target_claimed(out), pytest.raises(BlockingIOError, match=words):
        prune(checkpoint, out, choices)
    prune(checkpoint, out, choices)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.path.name, 'out']


def test_a_tensor_is_held_at_a_time(tmp_path):
    weights = normal((256, 1024))
    leaves = {str(number): Leaf(weights.shape, weights.dtype) for number in range(8)}
    write_tensors(tmp_path / 'dense', leaves, lambda name: weights)
    dense = open_checkpoint(tmp_path / 'dense')
    choices = choose(dense.leaves, 0.8)
    prune(dense, tmp_path / 'once', choices)  # compiles
    tracemalloc.start()
    try:
        prune(dense, tmp_path / 'out', choices)
        assert tracemalloc.get_traced_memory()[1] < 4 * weights.nbytes
    finally:
        tracemalloc.stop()
