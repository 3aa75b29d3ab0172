"""What a run of the strategies example leaves in its folder: its settings, and the state after its last epoch.

orbax writes a state beside the last one and renames it, so that an interruption at any moment leaves a whole one.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

from jaxpruner.files import atomic_files

SETTINGS_NAME = 'mnist_strategies.json'
STATES_NAME = 'mnist_strategies_states'


class RunError(ValueError):
    """A folder that cannot be used; the message names it and says what to do."""


class Snapshot(NamedTuple):
    """Where a training stands."""

    epoch: int  # the last one that has ended, 0 before the first
    state: TrainState
    mask_key: Any  # tree like the parameters of uint8 arrays, None where dense
    rng: jax.Array  # typed key that the next epoch splits


class Run:
    """A folder that belongs to one command, which goes on from there when it is given again."""

    def __init__(self, folder: Path, identity: dict[str, Any], fresh: bool = False):
        """Opens the folder.

        Args:
          folder: made if it is missing.
          identity: the settings that two runs must share for one to continue the other, as JSON can hold them.
          fresh: removes what an earlier run left.

        Raises:
          RunError: the folder holds another run, or is none.
        """
        self.folder = folder
        self._states = folder.absolute() / STATES_NAME
        if folder.exists() and not folder.is_dir():
            raise RunError(f'--out {folder} is a file: name a folder')
        if not fresh:
            self._refuse_others(identity)
        elif self._states.exists():
            shutil.rmtree(self._states)
        self._states.mkdir(parents=True, exist_ok=True)
        text = json.dumps(identity, indent=1) + '\n'
        atomic_files.replace_file(
            folder / SETTINGS_NAME, lambda temporary: temporary.write_text(text)
        )

    def save(self, snapshot: Snapshot) -> None:
        """Writes the state after an epoch; the one before it is removed then."""
        with self._manager() as manager:
            manager.save(snapshot.epoch, args=ocp.args.StandardSave(_as_tree(snapshot)))

    def restore(self, start: Snapshot) -> Snapshot:
        """Returns the last state that was saved, or `start`, which it must resemble.

        Raises:
          RunError: it cannot be read.
        """
        with self._manager() as manager:
            epoch = manager.latest_step()
            if epoch is None:
                return start
            try:
                tree = manager.restore(epoch, args=ocp.args.StandardRestore(_as_tree(start)))
            except (OSError, ValueError, TypeError, KeyError) as error:
                place = self._states / str(epoch)
                raise RunError(
                    f'{place} cannot be read ({_first_line(error)}); start again with --fresh'
                ) from error
        names = 'step', 'params', 'opt_state'
        state = start.state.replace(**{name: tree[name] for name in names})
        return Snapshot(epoch, state, tree['masks'], jax.random.wrap_key_data(tree['rng']))

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self._states, options=options)

    def _refuse_others(self, identity: dict[str, Any]) -> None:
        path = self.folder / SETTINGS_NAME
        if not path.exists() and not self._states.exists():
            return
        remedy = 'name another --out, or replace the run with --fresh'
        try:
            found = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(
                f'--out {self.folder}: {SETTINGS_NAME} cannot be read; {remedy}'
            ) from error
        if differing := [
            key for key in {**found, **identity} if found.get(key) != identity.get(key)
        ]:
            options = ', '.join(f'--{key.replace("_", "-")}' for key in differing)
            raise RunError(f'--out {self.folder} holds a run with another {options}; {remedy}')


def _as_tree(snapshot: Snapshot) -> dict[str, Any]:
    """The arrays of a state; its structure is the same at all epochs."""
    state = snapshot.state
    return {
        'step': jnp.asarray(state.step, jnp.int32),
        'params': state.params,
        'opt_state': state.opt_state,
        'masks': snapshot.mask_key,
        'rng': jax.random.key_data(snapshot.rng),
    }


def _first_line(error: Exception) -> str:
    return str(error).partition('\n')[0]
