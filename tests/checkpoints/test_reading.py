"""What is written is read, by this library and the format's own; what is damaged or foreign is refused by name."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors

from helpers import hostile_checkpoints
from jaxpruner.checkpoints import inspect_leaves, open_checkpoint, write_safetensors
from jaxpruner.checkpoints.reading import INDEX_NAME
from jaxpruner.files import dtypes


def random_bits(shape, dtype):
    """Any bits but for booleans, which have two."""
    rng = np.random.default_rng(len(shape))
    size = int(np.prod(shape)) * dtype.itemsize
    values = rng.integers(2 if dtype.kind == 'b' else 256, size=size, dtype=np.uint8)
    return values.view(dtype).reshape(shape)


def test_what_is_written_is_read(tmp_path):
    written = {
        f'{name} "ö" {shape}': random_bits(shape, dtype)
        for name, dtype in dtypes.SAFETENSORS.items()
        for shape in ((), (0, 3), (2, 3), (5,))
    }
    path, metadata = tmp_path / 'a.safetensors', {'ä': '"\n', 'format': 'pt'}
    write_safetensors(path, written, metadata)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.leaves) == list(written)
    assert checkpoint.metadata == metadata
    with safetensors.safe_open(path, 'numpy') as opened:
        assert opened.metadata() == metadata
        for name, array in written.items():
            found = checkpoint.read(name)
            assert (found.shape, found.dtype) == (array.shape, array.dtype)
            assert found.tobytes() == array.tobytes()
            found[...] = 0  # it is the reader's own
            if not name.startswith('F8'):
                assert opened.get_tensor(name).tobytes() == array.tobytes()


def test_a_file_that_shrinks_is_refused_by_name(tmp_path):
    path = tmp_path / 'a.safetensors'
    write_safetensors(path, {'w': np.ones(6)})
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r'a\.safetensors: w ends 10 bytes too early'):
        checkpoint.read('w')


@pytest.mark.parametrize('name', hostile_checkpoints.FILES)
def test_hostile_files_are_refused_by_name(name, tmp_path):
    path = tmp_path / 'hostile.safetensors'
    hostile_checkpoints.FILES[name](path)
    words = ' is no checkpoint' if name == 'a folder' else ''
    with pytest.raises((ValueError, OSError), match=f'hostile.safetensors{words}'):
        open_checkpoint(path)


@pytest.mark.parametrize('path', ['.', INDEX_NAME])
def test_shards_are_one_checkpoint(tmp_path, path):
    write_safetensors(tmp_path / 'one.safetensors', {'a': np.arange(8.0)}, {'format': 'np'})
    write_safetensors(tmp_path / 'two.safetensors', {'b': np.arange(4).astype(ml_dtypes.bfloat16)})
    weight_map = {'a': 'one.safetensors', 'b': 'two.safetensors'}
    (tmp_path / INDEX_NAME).write_text(json.dumps({'weight_map': weight_map}))
    checkpoint = open_checkpoint(tmp_path / path)
    assert {name: leaf.dtype.name for name, leaf in checkpoint.leaves.items()} == {
        'a': 'float64',
        'b': 'bfloat16',
    }
    assert checkpoint.read('b').tolist() == [0, 1, 2, 3]
    assert checkpoint.metadata == {'format': 'np'}


@pytest.mark.parametrize('name', hostile_checkpoints.INDICES)
def test_hostile_indices_are_refused_by_name(name, tmp_path):
    arrays = {'w': np.ones((2, 4), np.float32)}
    hostile_checkpoints.write_safetensors(tmp_path / 'one.safetensors', arrays)
    hostile_checkpoints.INDICES[name](tmp_path)
    with pytest.raises((ValueError, OSError), match='hostile'):
        open_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused_with_what_was_looked_for(tmp_path):
    words = r'is no checkpoint: it has no \*\.safetensors, no model\..* no _METADATA'
    with pytest.raises(ValueError, match=words):
        open_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r'nowhere: there is no such file or folder'):
        open_checkpoint(tmp_path / 'nowhere')
    write_safetensors(tmp_path / 'any.safetensors', {'w': np.ones(2)})
    assert open_checkpoint(tmp_path).path.name == 'any.safetensors'
    write_safetensors(tmp_path / 'other.safetensors', {'w': np.ones(2)})
    words = r'several safetensors files \(any.safetensors, other.safetensors\); name one'
    with pytest.raises(ValueError, match=words):
        open_checkpoint(tmp_path)


TREE = {
    'layer': {'kernel': jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 4), 'bias': jnp.ones(4)},
    'blocks': [jnp.zeros((2, 2)), jnp.arange(3)],
    'step': 7,
}


def test_orbax_is_read_by_leaf(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (3, 10):
            manager.save(step, args=ocp.args.StandardSave(TREE))
        manager.wait_until_finished()
    with pytest.raises(ValueError, match=r'is no checkpoint: .*the steps 3, 10: name one of these'):
        open_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path / '3')
    assert set(checkpoint.leaves) == {'layer/kernel', 'layer/bias', 'blocks/0', 'blocks/1', 'step'}
    kernel = checkpoint.read('layer/kernel')
    np.testing.assert_array_equal(kernel, np.asarray(TREE['layer']['kernel']), strict=True)
    kernel[:] = 0  # what is read is the reader's own
    assert checkpoint.read('layer/kernel').astype(float).sum() == 28
    assert int(checkpoint.read('step')) == 7
    sparsities = {report.name: report.sparsity for report in inspect_leaves(checkpoint)}
    assert (sparsities['blocks/0'], sparsities['layer/bias']) == (1, 0)


def test_half_an_orbax_folder_is_refused(tmp_path):
    unfinished = tmp_path / 'saved.orbax-checkpoint-tmp-0'
    unfinished.mkdir()
    with pytest.raises(ValueError, match='has not finished writing'):
        open_checkpoint(unfinished)
    (tmp_path / '_METADATA').write_text('{}')
    with pytest.raises(ValueError, match='orbax cannot read what was saved here'):
        open_checkpoint(tmp_path)
