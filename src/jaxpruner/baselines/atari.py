"""Atari games, which ale-py's own vector environment plays on the host; its wheel holds the games.

Frames are those of Dopamine (Castro et al. 2018, https://arxiv.org/abs/1812.06110), which follows Machado et al. 2018
(https://doi.org/10.1613/jair.5699): gray, the maximum of the last two of four frames, 84 x 84 by area, sticky actions.
A lost life does not end a game, unlike in Mnih et al. 2015.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.data import imported
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Values

SIZE = 84  # pixels of a side
STACK = 4  # frames of an observation
SHAPE = (SIZE, SIZE, STACK)  # of an observation
_ENDED = 1
_CUT = 2


class Transitions(NamedTuple):
    """What happened in several steps of an environment; the first axis counts them."""

    observation: Any  # bool[n, height, width, channels], or uint8
    action: Any  # int32[n]
    reward: Any  # float32[n]
    next_observation: Any  # like observation; at an end, not of the next game's start
    terminal: Any  # bool[n]; not where a game was cut off for its length


def exploration(recipe: Recipe, number: jax.Array | int) -> Any:
    """The probability of a random action at a step: from 1 linearly to `task.epsilon_end`."""
    steps = max(1, recipe.share(recipe.task['epsilon_until']))
    clip = np.clip if isinstance(number, int) else jnp.clip  # on the host without the device
    return 1 + clip(number / steps, 0, 1) * (recipe.task['epsilon_end'] - 1)


def check_game(name: str) -> str:
    """The file's name of a game in ale-py; a `ValueError` for an unknown game.

    >>> check_game('MsPacman')
    'ms_pacman'
    """
    names = imported('ale_py.roms', 'Atari games', extra='games').get_all_rom_ids()
    by_name = {name.title().replace('_', ''): name for name in names}
    if name not in by_name:
        raise ValueError(
            f'data: the Arcade Learning Environment has no game {name!r}; '
            f'{tree_lib.nearest(name, by_name)}'
        )
    return by_name[name]


def make_games(recipe: Recipe, count: int, longest: int) -> Any:
    """Plays the recipe's game several times at once, as gymnasium's `VectorEnv`.

    A game that ends begins anew in the same step; one of `longest` moves is cut off. Observations are
    uint8[count, 4, 84, 84], the oldest frame first, and zeros where the game is younger.
    """
    ale = imported('ale_py', 'Atari games', extra='games')
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
    return imported('ale_py.vector_env', 'Atari games', extra='games').AtariVectorEnv(
        check_game(recipe.data),
        count,
        max_num_frames_per_episode=longest * recipe.task['frame_skip'],
        repeat_action_probability=recipe.task['sticky'],
        frameskip=recipe.task['frame_skip'],
        noop_max=recipe.task['no_ops'],
        reward_clipping=False,
        use_fire_reset=False,
        autoreset_mode='SameStep',
    )


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

    `epsilon` is how often any action is taken instead of the best; 1 is random play, to compare learned returns with.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> short = WORKLOADS['dqn'].default('atari').updated({'task': {'test_longest': 3}})
    >>> float(returns(short, lambda observations: None, 0, epsilon=1.0).sum())
    0.0
    """
    rng = np.random.default_rng([seed, 1])
    games = make_games(recipe, recipe.task['test_games'], recipe.task['test_longest'])
    observations, _ = games.reset(seed=int(rng.integers(2**31)))
    sums = np.zeros(len(observations))
    is_playing = np.ones(len(sums), bool)
    while is_playing.any():
        actions = choose(observations, games.single_action_space.n, values, epsilon, rng)
        observations, rewards, ended, cut, _ = games.step(actions)
        sums += rewards * is_playing
        is_playing &= ~(ended | cut)
    return sums


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
        # The newest row has no next frame yet, and the oldest may have lost the frames behind it.
        overwritten = max(0, self._added - self._rows)
        first = overwritten + STACK - 1 if overwritten else 0

        def draw(size):
            rows = rng.integers(first, self._added - 1, size)
            return rows, rng.integers(self.arrays['action'].shape[1], size=size)

        rows, games = draw(size)
        # The next frame of a game that was cut off is not kept: its last move is drawn again.
        while (is_cut := self._at('ending', rows, games) == _CUT).any():
            rows[is_cut], games[is_cut] = draw(int(is_cut.sum()))
        return Transitions(
            observation=self._stacked(rows, games),
            action=self._at('action', rows, games).astype(np.int32),
            reward=self._at('reward', rows, games),
            next_observation=self._stacked(rows + 1, games),
            terminal=self._at('ending', rows, games) == _ENDED,
        )

    def _at(self, name: str, rows: np.ndarray, games: np.ndarray) -> np.ndarray:
        return self.arrays[name][rows % self._rows, games]

    def _stacked(self, rows: np.ndarray, games: np.ndarray) -> np.ndarray:
        """The frames of rows and those behind them of the same game, the oldest first; zeros before its beginning."""
        drawn = rows[:, None] - np.arange(STACK), games[:, None]
        frames, is_last = self._at('frames', *drawn), self._at('ending', *drawn) != 0
        is_last[:, 0] = False  # of the row itself
        is_earlier = np.logical_or.accumulate(is_last | (drawn[0] < 0), axis=1)
        frames[is_earlier] = 0
        return np.moveaxis(frames[:, ::-1], 1, -1)


class AtariFeed:
    """Moves in all games, and a batch of earlier ones, for each update."""

    def __init__(self, recipe: Recipe, seed: int):
        """Begins the games; the first batch is preceded by random play."""
        self._recipe = recipe
        self._numbers = recipe.task
        count = self._numbers['environments']
        self._rng = np.random.default_rng(seed)
        self._games = make_games(recipe, count, self._numbers['longest'])
        self._replay = FrameReplay(self._numbers['replay'], count)
        self._batches = 0
        self._begin()

    def next(self, values: Values) -> Transitions:
        """As of any feed; `values` are those of each action."""
        epsilon = float(exploration(self._recipe, self._batches))  # 1 before the first batch
        while len(self._replay) < self._numbers['replay_start']:
            self._move(values, epsilon)
        for _ in range(self._numbers['moves'] // self._numbers['environments']):
            self._move(values, epsilon)
        self._batches += 1
        return self._replay.sample(self._rng, self._recipe.batch_size)

    def state(self) -> dict[str, np.ndarray]:
        """The generator, and how many batches there were; games and buffer are not kept."""
        about = self._batches, self._rng.bit_generator.state
        return {'about': np.frombuffer(json.dumps(about).encode(), np.uint8)}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up a position; the games begin anew, and the buffer is filled anew."""
        self._batches, self._rng.bit_generator.state = json.loads(state['about'].tobytes())
        self._begin()

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self) -> None:
        self._observations, _ = self._games.reset(seed=int(self._rng.integers(2**31)))

    def _move(self, values: Values, epsilon: float) -> None:
        before = self._observations
        actions = choose(before, self._games.single_action_space.n, values, epsilon, self._rng)
        self._observations, rewards, ended, cut, _ = self._games.step(actions)
        self._replay.add(
            frames=before[:, -1],
            action=actions,
            reward=np.clip(rewards, -1, 1),
            ending=np.where(ended, _ENDED, _CUT * cut),
        )
