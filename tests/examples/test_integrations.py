"""The integration scripts run as they stand; they assert what they promise."""

import pathlib
import runpy

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'examples' / 'integrations'
SCRIPTS = {  # and the module that each needs
    'linen_train_state': 'flax',
    'nnx_optimizer': 'flax',
    'equinox_filtered': 'equinox',
    'haiku_transform': 'haiku',
    'keras_loop': 'keras',
    'keras_fit': 'keras',
    'orbax_resume': 'orbax.checkpoint',
    'fedjax_server': 'fedjax',
}
IN_ENVIRONMENTS_OF_THEIR_OWN = {
    'brax_ppo',
    'dopamine_dqn',
    'kauldron_trainer',
    'keras_hub_lm',
    'levanter_train',
    'maxtext_train',
    'qwix_quantised',
    'tunix_finetune',
}


@pytest.mark.parametrize('script', SCRIPTS)
# Keras 3.15 asks JAX for int64 where it traces a layer.
@pytest.mark.filterwarnings('ignore:Explicitly requested dtype int64:UserWarning')
def test_runs(script, monkeypatch):
    monkeypatch.setenv('KERAS_BACKEND', 'jax')  # what the scripts set is taken back
    pytest.importorskip(SCRIPTS[script])
    monkeypatch.setitem(vars(jax), 'tree_map', jax.tree.map)
    runpy.run_path(str(FOLDER / f'{script}.py'), run_name='__main__')


def test_every_script_is_run():
    scripts = {path.stem for path in FOLDER.glob('*.py')}
    assert scripts == SCRIPTS.keys() | IN_ENVIRONMENTS_OF_THEIR_OWN
    for script in IN_ENVIRONMENTS_OF_THEIR_OWN:
        assert f' {script} ' in (ROOT / 'run.sh').read_text()
