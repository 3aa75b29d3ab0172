"""The feed of DQN on Atari games: it plays, keeps what it saw, and draws batches of that."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner.baselines.atari import Conventions, Emulators, choose, play_games
from jaxpruner.baselines.device_replay import Transitions
from jaxpruner.baselines.dqn_learning import exploration
from jaxpruner.baselines.feeds import Values
from jaxpruner.baselines.frame_replay import FrameReplay
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.files.atomic_files import replacing

_FRAMES = 'frames.npy'
_OTHERS = 'player.npz'
_PREFIX = 'emulators_'  # of the emulators' arrays in the second file
_AT_LEAST = {'environments': 1, 'frame_skip': 1, 'no_ops': 0, 'longest': 2, 'test_games': 1}


class AtariFeed:
    """Moves in all games, and a batch of earlier ones, for each update."""

    def __init__(self, recipe: Recipe, seed: int):
        """Begins the games; the first batch is preceded by random play."""
        check_numbers(recipe)
        self._recipe = recipe
        self._numbers = dict[str, Any](recipe.task)
        count = self._numbers['environments']
        self._rng = np.random.default_rng(seed)
        self._emulators = Emulators(recipe.data, count, self._rng, conventions(recipe))
        self._replay = FrameReplay(self._numbers['replay'], count)
        self._batches = 0

    def next(self, values: Values) -> Transitions:
        """As `Feed.next`; `values` are those of each action."""
        count = self._numbers['environments']
        while len(self._replay) < self._numbers['replay_start']:
            self._move(values, 1.0)
        epsilon = float(exploration(self._recipe, self._batches))
        for _ in range(self._numbers['moves'] // count):
            self._move(values, epsilon)
        self._batches += 1
        return self._replay.sample(self._rng, self._recipe.batch_size)

    def save(self, folder: Path) -> None:
        """As `Feed.save`: the games, the buffer and the generator."""
        about = {
            'batches': self._batches,
            'moves': len(self._replay),
            'rng': self._rng.bit_generator.state,
        }
        arrays: dict[str, Any] = self._replay.kept()
        arrays['about'] = np.array(json.dumps(about))
        for name, array in self._emulators.state().items():
            arrays[_PREFIX + name] = array
        frames = arrays.pop('frames')
        _write(folder / _FRAMES, lambda file: np.save(file, frames))
        _write(folder / _OTHERS, lambda file: np.savez(file, **arrays))

    def restore(self, folder: Path) -> None:
        """As `Feed.restore`; the error names the file that is missing, damaged or of another feed."""
        path = folder / _OTHERS
        try:
            with path.open('rb') as file, np.load(file) as archive:
                arrays = dict(archive)
            about = json.loads(str(arrays['about']))
            path = folder / _FRAMES
            arrays['frames'] = np.load(path, mmap_mode='r')
            self._replay.restore(arrays, about['moves'])
            path = folder / _OTHERS
            state = {}
            for name, array in arrays.items():
                if name.startswith(_PREFIX):
                    state[name.removeprefix(_PREFIX)] = array
            self._emulators.set_state(state)
        except Exception as error:  # whatever NumPy and zipfile raise for damaged files
            raise ValueError(
                f'{path} is not what a feed of this recipe saved ({error}): remove {folder}'
            ) from error
        self._batches = about['batches']
        self._rng.bit_generator.state = about['rng']

    def close(self) -> None:
        """Nothing is open."""

    def _move(self, values: Values, epsilon: float) -> None:
        actions = choose(self._emulators, values, epsilon, self._rng)
        self._replay.play(self._emulators, actions)


def conventions(recipe: Recipe) -> Conventions:
    """How a recipe wants games to be played."""
    numbers: Any = recipe.task
    return Conventions(**{name: numbers[name] for name in Conventions._fields})


def check_numbers(recipe: Recipe) -> None:
    """Refuses numbers that do not fit together; the error names the key and what it must be."""
    numbers: Any = recipe.task
    count = numbers['environments']
    for name in ('replay', 'replay_start', 'moves'):
        moves = numbers[name]
        if moves % max(1, count) or moves < 1:
            raise ValueError(f'task.{name} {moves} must be a multiple of task.environments {count}')
    for name, least in _AT_LEAST.items():
        if numbers[name] < least:
            raise ValueError(f'task.{name} must be at least {least}, got {numbers[name]}')
    for name in ('sticky', 'epsilon_end', 'test_epsilon'):
        if not 0 <= numbers[name] <= 1:
            raise ValueError(f'task.{name} is a probability, got {numbers[name]}')
    if numbers['replay'] < 8 * count:
        raise ValueError(
            f'task.replay {numbers["replay"]} must hold 8 moves of each of {count} environments'
        )


def returns(recipe: Recipe, values: Values, seed: int, epsilon: float) -> np.ndarray:
    """Plays whole games as a recipe evaluates: the sums of unclipped rewards, float64[games].

    `epsilon` is how often any action is taken instead of the best.
    """
    numbers: Any = recipe.task
    rng = np.random.default_rng([seed, 1])
    short = conventions(recipe)._replace(longest=numbers['test_longest'])
    emulators = Emulators(recipe.data, numbers['test_games'], rng, short)
    return play_games(emulators, values, epsilon, rng)


def random_returns(recipe: Recipe, seed: int = 0) -> np.ndarray:
    """Returns of random play under the same evaluation, to compare learned returns with.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> short = WORKLOADS['dqn'].default('atari').updated({'task': {'test_longest': 3}})
    >>> float(random_returns(short).sum())
    0.0
    """
    return returns(recipe, lambda observations: np.zeros(0), seed, 1.0)


def _write(path: Path, write: Callable[[Any], None]) -> None:
    with replacing(path) as temporary, temporary.open('wb') as file:
        write(file)
