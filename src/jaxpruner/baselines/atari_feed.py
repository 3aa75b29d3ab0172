"""The feed of DQN on Atari games: it plays, keeps what it saw, and hands out what it draws of that."""

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
from jaxpruner.core.atomic_files import replacing


class AtariFeed:
    """Moves in all games, and a batch of earlier ones, for each update."""

    def __init__(self, recipe: Recipe, seed: int):
        """Begins the games; the first batch is preceded by random play."""
        check_numbers(recipe)
        self._recipe, self._numbers = recipe, dict[str, Any](recipe.task)
        count = self._numbers['environments']
        self._rng = np.random.default_rng(seed)
        self._emulators = Emulators(recipe.data, count, self._rng, conventions(recipe))
        self._replay = FrameReplay(self._numbers['replay'], count)
        self._batches = 0

    def next(self, values: Values) -> Transitions:
        """Plays on and draws a batch."""
        count = self._numbers['environments']
        while len(self._replay) < self._numbers['replay_start']:
            self._move(values, 1.0)
        epsilon = float(exploration(self._recipe, self._batches))
        for _ in range(self._numbers['moves'] // count):
            self._move(values, epsilon)
        self._batches += 1
        return self._replay.sample(self._rng, self._recipe.batch_size)

    def save(self, folder: Path) -> None:
        """Writes the games, the buffer and the generator."""
        about = {
            'batches': self._batches,
            'moves': len(self._replay),
            'rng': self._rng.bit_generator.state,
        }
        arrays: dict[str, Any] = {**self._replay.kept(), 'about': np.array(json.dumps(about))}
        arrays |= {f'emulators_{name}': array for name, array in self._emulators.state().items()}
        frames = arrays.pop('frames')
        _write(folder / _FRAMES, lambda file: np.save(file, frames))
        _write(folder / _REST, lambda file: np.savez(file, **arrays))

    def restore(self, folder: Path) -> None:
        """Goes on where `save` was called."""
        path = folder / _REST
        try:
            with path.open('rb') as file, np.load(file) as rest:
                arrays = dict(rest)
            about = json.loads(str(arrays['about']))
            path = folder / _FRAMES
            self._replay.restore({**arrays, 'frames': np.load(path, mmap_mode='r')}, about['moves'])
            path = folder / _REST
            start = 'emulators_'
            self._emulators.set_state(
                {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
            )
        except Exception as error:  # whatever NumPy and zipfile raise for damaged files
            raise ValueError(
                f'{path} is not what a feed of this recipe saved ({error}): remove {folder}'
            ) from error
        self._batches = about['batches']
        self._rng.bit_generator.state = about['rng']

    def close(self) -> None:
        """Nothing is open."""

    def _move(self, values: Values, epsilon: float) -> None:
        self._replay.play(self._emulators, choose(self._emulators, values, epsilon, self._rng))


def conventions(recipe: Recipe) -> Conventions:
    """How a recipe wants games to be played."""
    numbers: Any = recipe.task
    return Conventions(**{name: numbers[name] for name in Conventions._fields})


def check_numbers(recipe: Recipe) -> None:
    """Refuses numbers that do not fit together."""
    numbers: Any = recipe.task
    count = numbers['environments']
    for name in ('replay', 'replay_start', 'moves'):
        if numbers[name] % max(1, count) or numbers[name] < 1:
            raise ValueError(
                f'task.{name} {numbers[name]} must be a multiple of task.environments {count}'
            )
    for name, least in [
        ('environments', 1),
        ('frame_skip', 1),
        ('no_ops', 0),
        ('longest', 2),
        ('test_games', 1),
    ]:
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
    """Plays whole games as a recipe evaluates."""
    numbers: Any = recipe.task
    rng = np.random.default_rng([seed, 1])
    short = conventions(recipe)._replace(longest=numbers['test_longest'])
    return play_games(
        Emulators(recipe.data, numbers['test_games'], rng, short), values, epsilon, rng
    )


def random_returns(recipe: Recipe, seed: int = 0) -> np.ndarray:
    """Returns of random play under the same evaluation, with which a learned return is compared.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> float(random_returns(WORKLOADS['dqn'].default('atari').updated({'task': {'test_longest': 3}})).sum())
    0.0
    """
    return returns(recipe, lambda observations: np.zeros(0), seed, 1.0)


_FRAMES, _REST = 'frames.npy', 'player.npz'


def _write(path: Path, write: Callable[[Any], None]) -> None:
    with replacing(path) as temporary, temporary.open('wb') as file:
        write(file)
