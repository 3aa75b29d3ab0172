"""DQN on Atari games, which ale-py's own vector environment plays on the host; its wheel holds the games.

Frames are those of Dopamine (Castro et al. 2018, https://arxiv.org/abs/1812.06110), which follows Machado et al. 2018
(https://doi.org/10.1613/jair.5699): gray, the maximum of the last two of four frames, 84 x 84 by area, sticky actions.
A lost life does not end a game, unlike in Mnih et al. 2015.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.minatar import Transitions, exploration
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Values

SIZE = 84  # pixels of a side
STACK = 4  # frames of an observation
SHAPE = (SIZE, SIZE, STACK)  # of an observation
_ENDED = 1
_CUT = 2
_AT_LEAST = {'environments': 1, 'frame_skip': 1, 'no_ops': 0, 'longest': 2, 'test_games': 1}


def check_game(name: str) -> str:
    """The file's name of a game in ale-py; a `ValueError` for an unknown game.

    >>> check_game('MsPacman')
    'ms_pacman'
    """
    file_names = {}
    for file_name in _ale().roms.get_all_rom_ids():
        file_names[''.join(word.capitalize() for word in file_name.split('_'))] = file_name
    if name not in file_names:
        raise ValueError(
            f'data: the Arcade Learning Environment has no game {name!r}; '
            f'{tree_lib.nearest(name, file_names)}'
        )
    return file_names[name]


def check_numbers(recipe: Recipe) -> None:
    """Refuses numbers that do not fit together; the error names the key and what it must be."""
    numbers: Any = recipe.task
    count = numbers['environments']
    for name, least in _AT_LEAST.items():
        if numbers[name] < least:
            raise ValueError(f'task.{name} must be at least {least}, got {numbers[name]}')
    for name in ('replay', 'replay_start', 'moves'):
        moves = numbers[name]
        if moves % count or moves < 1:
            raise ValueError(f'task.{name} {moves} must be a multiple of task.environments {count}')
    for name in ('sticky', 'epsilon_end', 'test_epsilon'):
        if not 0 <= numbers[name] <= 1:
            raise ValueError(f'task.{name} is a probability, got {numbers[name]}')
    if numbers['replay'] < 8 * count:
        raise ValueError(
            f'task.replay {numbers["replay"]} must hold 8 moves of each of {count} environments'
        )


def make_games(recipe: Recipe, count: int, longest: int) -> Any:
    """Plays the recipe's game several times at once, as gymnasium's `VectorEnv`.

    A game that ends begins anew in the same step; one of `longest` moves is cut off. Observations are
    uint8[count, 4, 84, 84], the oldest frame first, and zeros where the game is younger.
    """
    numbers: Any = recipe.task
    return _ale().vector_env.AtariVectorEnv(
        check_game(recipe.data),
        count,
        max_num_frames_per_episode=longest * numbers['frame_skip'],
        repeat_action_probability=numbers['sticky'],
        frameskip=numbers['frame_skip'],
        noop_max=numbers['no_ops'],
        reward_clipping=False,
        use_fire_reset=False,
        autoreset_mode='SameStep',
    )


def count_actions(recipe: Recipe) -> int:
    """How many actions the recipe's game knows."""
    return int(make_games(recipe, 1, 1).single_action_space.n)


@functools.cache
def _ale() -> Any:
    """The package of the games, imported here so that the other workloads do without."""
    try:
        import ale_py
        import ale_py.roms
        import ale_py.vector_env
    except ImportError as error:
        raise ImportError(
            f"dqn plays Atari games of ale-py ({error}): pip install 'jaxpruner[games]'"
        ) from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return ale_py


def choose(
    observations: np.ndarray, actions: int, values: Values, epsilon: float, rng: Any
) -> np.ndarray:
    """Picks the best action in each game, or with a probability of epsilon any: int64[count].

    `values` maps observations [count, 84, 84, 4] to float[count, actions]; it is not asked where it has no effect.
    """
    count = len(observations)
    is_random = rng.random(count) < epsilon
    random = rng.integers(actions, size=count)
    if is_random.all():
        return random
    action_values = np.asarray(values(np.moveaxis(observations, 1, -1)))
    return np.where(is_random, random, action_values.argmax(axis=-1))


def returns(recipe: Recipe, values: Values, seed: int, epsilon: float) -> np.ndarray:
    """Plays whole games as a recipe evaluates: the sums of unclipped rewards, float64[games].

    `epsilon` is how often any action is taken instead of the best.
    """
    numbers: Any = recipe.task
    rng = np.random.default_rng([seed, 1])
    games = make_games(recipe, numbers['test_games'], numbers['test_longest'])
    observations, _ = games.reset(seed=int(rng.integers(2**31)))
    sums = np.zeros(len(observations))
    is_playing = np.ones(len(sums), bool)
    while is_playing.any():
        actions = choose(observations, games.single_action_space.n, values, epsilon, rng)
        observations, rewards, ended, cut, _ = games.step(actions)
        sums += rewards * is_playing
        is_playing &= ~(ended | cut)
    return sums


def random_returns(recipe: Recipe, seed: int = 0) -> np.ndarray:
    """Returns of random play under the same evaluation, to compare learned returns with.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> short = WORKLOADS['dqn'].default('atari').updated({'task': {'test_longest': 3}})
    >>> float(random_returns(short).sum())
    0.0
    """
    return returns(recipe, lambda observations: np.zeros(0), seed, 1.0)


class FrameReplay:
    """The newest moves of several games: a row for each move, a column for each game.

    A frame is kept once, so that the observations of four frames are put together when they are drawn.
    """

    def __init__(self, capacity: int, count: int):
        """Makes an empty buffer of a capacity in moves, in all games together."""
        self._rows = capacity // count
        self._added = 0  # rows, ever
        shape = self._rows, count
        self.arrays: dict[str, np.ndarray] = {
            'frames': np.zeros((*shape, SIZE, SIZE), np.uint8),  # the newest before the move
            'behind': np.zeros(shape, np.uint8),  # frames of the same game before it, at most 3
            'action': np.zeros(shape, np.uint8),
            'reward': np.zeros(shape, np.float32),  # clipped to [-1, 1]
            'ending': np.zeros(shape, np.uint8),  # 1 where the game ended, 2 where it was cut off
        }

    def __len__(self) -> int:
        """How many moves were ever added."""
        return self._added * self.arrays['action'].shape[1]

    def add(self, **row: np.ndarray) -> None:
        """Keeps a move in each game, in place of the oldest."""
        for name, values in row.items():
            self.arrays[name][self._added % self._rows] = values
        self._added += 1

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """Draws moves uniformly, with repetition, as transitions of NumPy arrays."""
        rows, games = self._draw(rng, size)
        # The next frame of a game that was cut off is not kept: its last move is drawn again.
        ending = self.arrays['ending']
        while (is_cut := ending[rows % self._rows, games] == _CUT).any():
            rows[is_cut], games[is_cut] = self._draw(rng, int(is_cut.sum()))
        moves = rows % self._rows, games
        drawn: dict[str, Any] = {
            'observation': self._stacked(rows, games),
            'action': self.arrays['action'][moves].astype(np.int32),
            'reward': self.arrays['reward'][moves],
            'next_observation': self._stacked(rows + 1, games),
            'terminal': ending[moves] == _ENDED,
        }
        return Transitions(**drawn)

    def kept(self) -> dict[str, np.ndarray]:
        """The rows that are in use, by the names of the arrays; no copies."""
        return {name: array[: self._added] for name, array in self.arrays.items()}

    def restore(self, kept: Mapping[str, np.ndarray], moves: int) -> None:
        """Becomes what another buffer was, from its `kept` and its length; its games were cut off."""
        self._added = moves // self.arrays['action'].shape[1]
        for name, rows in self.kept().items():
            rows[:] = kept[name]
        if self._added:
            ending = self.arrays['ending'][(self._added - 1) % self._rows]
            ending[ending == 0] = _CUT

    def _draw(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and games.

        The newest row has no next frame yet, and the oldest may have lost the frames behind it.
        """
        overwritten = max(0, self._added - self._rows)
        first = overwritten + STACK - 1 if overwritten else 0
        rows = rng.integers(first, self._added - 1, size)
        games = rng.integers(self.arrays['action'].shape[1], size=size)
        return rows, games

    def _stacked(self, rows: np.ndarray, games: np.ndarray) -> np.ndarray:
        """The frames of rows and those behind them of the same game, the oldest first."""
        back = np.arange(STACK)[::-1]
        frames = self.arrays['frames'][(rows[:, None] - back) % self._rows, games[:, None]]
        behind = self.arrays['behind'][rows % self._rows, games]
        frames[back > behind[:, None]] = 0
        return np.moveaxis(frames, 1, -1)


class AtariFeed:
    """Moves in all games, and a batch of earlier ones, for each update."""

    def __init__(self, recipe: Recipe, seed: int):
        """Begins the games; the first batch is preceded by random play."""
        self._recipe = recipe
        self._numbers = dict[str, Any](recipe.task)
        count = self._numbers['environments']
        self._rng = np.random.default_rng(seed)
        self._games = make_games(recipe, count, self._numbers['longest'])
        self._replay = FrameReplay(self._numbers['replay'], count)
        self._batches = 0
        self._begin()

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

    def state(self) -> dict[str, np.ndarray]:
        """As `Feed.state`: the buffer and the generator; the games are not kept."""
        about = {
            'batches': self._batches,
            'moves': len(self._replay),
            'rng': self._rng.bit_generator.state,
        }
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        return {'about': text, **self._replay.kept()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """As `Feed.set_state`; the games begin anew."""
        about = json.loads(state['about'].tobytes())
        self._replay.restore(state, about['moves'])
        self._batches = about['batches']
        self._rng.bit_generator.state = about['rng']
        self._begin()

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self) -> None:
        self._observations, _ = self._games.reset(seed=int(self._rng.integers(2**31)))
        self._behind = np.zeros(len(self._observations), np.uint8)

    def _move(self, values: Values, epsilon: float) -> None:
        before = self._observations
        actions = choose(before, self._games.single_action_space.n, values, epsilon, self._rng)
        self._observations, rewards, ended, cut, _ = self._games.step(actions)
        self._replay.add(
            frames=before[:, -1],
            behind=self._behind,
            action=actions,
            reward=np.clip(rewards, -1, 1),
            ending=np.where(ended, _ENDED, _CUT * cut),
        )
        self._behind = np.where(ended | cut, 0, np.minimum(self._behind + 1, STACK - 1))
