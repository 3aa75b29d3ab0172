"""Which checkpoints are recognised, and what is said of the rest; orbax's, leaf by leaf."""

import importlib
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpruner.checkpoints import inspect_leaves, open_checkpoint, write_safetensors

TREE = {
    'layer': {'kernel': jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 4), 'bias': jnp.ones(4)},
    'blocks': [jnp.zeros((2, 2)), jnp.arange(3)],
    'step': 7,
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp('orbax') / 'saved'
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, TREE)
    return path


def test_orbax_is_read_by_leaf(saved):
    checkpoint = open_checkpoint(saved)
    assert set(checkpoint.leaves) == {'layer/kernel', 'layer/bias', 'blocks/0', 'blocks/1', 'step'}
    kernel = checkpoint.read('layer/kernel')
    np.testing.assert_array_equal(kernel, np.asarray(TREE['layer']['kernel']), strict=True)
    kernel[:] = 0  # what is read is the reader's own
    assert checkpoint.read('layer/kernel').astype(float).sum() == 28
    assert int(checkpoint.read('step')) == 7
    sparsities = {report.name: report.structure.sparsity for report in inspect_leaves(checkpoint)}
    assert sparsities['blocks/0'] == 1
    assert sparsities['layer/bias'] == 0


def test_orbax_managers_steps(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (3, 10):
            manager.save(step, args=ocp.args.StandardSave(TREE))
        manager.wait_until_finished()
    assert 'layer/bias' in open_checkpoint(tmp_path / '3').leaves
    with pytest.raises(
        ValueError, match=r'is no checkpoint: .*it has the steps 3, 10: name one of these'
    ):
        open_checkpoint(tmp_path)


def test_what_orbax_had_not_finished_is_refused(tmp_path):
    folder = tmp_path / 'saved.orbax-checkpoint-tmp-0'
    folder.mkdir()
    with pytest.raises(ValueError, match='has not finished writing'):
        open_checkpoint(folder)


def test_a_damaged_orbax_folder_is_refused(tmp_path):
    (tmp_path / '_METADATA').write_text('{}')
    with pytest.raises(ValueError, match='orbax cannot read what was saved here'):
        open_checkpoint(tmp_path)


def test_a_folder_with_one_file_is_that_file(tmp_path):
    write_safetensors(tmp_path / 'any.safetensors', {'w': np.ones(2)})
    assert open_checkpoint(tmp_path).path.name == 'any.safetensors'
    write_safetensors(tmp_path / 'other.safetensors', {'w': np.ones(2)})
    with pytest.raises(
        ValueError,
        match=r'several safetensors files \(any.safetensors, other.safetensors\); name one',
    ):
        open_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(
        ValueError, match=r'is no checkpoint: it has no \*\.safetensors, no model\..* no _METADATA'
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r'nowhere: there is no such file or folder'):
        open_checkpoint(tmp_path / 'nowhere')


def test_without_the_extra_the_error_names_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith('jaxpruner.checkpoints')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    with pytest.raises(
        ModuleNotFoundError, match=r"need safetensors, .*'jaxpruner\[checkpoint\]'"
    ) as caught:
        importlib.import_module('jaxpruner.checkpoints')
    assert caught.value.name == 'safetensors'
