"""DQN on Atari games of the Arcade Learning Environment (ale-py, whose wheel holds the games), played on the host.

Frames are those of Dopamine (Castro et al. 2018, https://arxiv.org/abs/1812.06110), which follows Machado et al. 2018
(https://doi.org/10.1613/jair.5699): gray, the maximum of the last two of four frames, 84 x 84 by area, sticky actions.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.minatar import Transitions, exploration
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Values
from jaxpruner.files.atomic_files import replacing

SIZE = 84  # pixels of a side
STACK = 4  # frames of an observation
SHAPE = (SIZE, SIZE, STACK)  # of an observation


class Conventions(NamedTuple):
    """How a game is played; the actions are those that the game knows (the minimal set).

    A lost life does not end a game, unlike in Mnih et al. 2015.
    """

    frame_skip: int = 4  # frames for which an action is held
    # Probability in each frame that the action before is held on (Machado et al. 2018).
    sticky: float = 0.25
    no_ops: int = 30  # a game begins with up to so many frames without an action (Mnih et al. 2015)
    longest: int = 27_000  # moves after which a game is cut off: half an hour


class Outcome(NamedTuple):
    """What a move in each game brought."""

    reward: np.ndarray  # float64[count]: change of the score
    ended: np.ndarray  # bool[count]
    cut: np.ndarray  # bool[count]: the game would go on, but reached its time limit


class Emulators:
    """A game played several times at once; one that ends begins anew.

    `observations`, uint8[count, 84, 84, 4], has the oldest frame first, and zeros where the game is
    younger; `behind`, uint8[count], counts the frames of the game besides the newest.

    >>> emulators = Emulators('MsPacman', 2, np.random.default_rng(0))
    >>> emulators.actions, emulators.observations.shape, emulators.step(np.zeros(2, int)).reward
    (9, (2, 84, 84, 4), array([0., 0.]))
    """

    def __init__(
        self,
        game: str,
        count: int,
        rng: np.random.Generator,
        conventions: Conventions = Conventions(),
    ):
        """Begins the games; `rng` draws their seeds and first frames, and is used on."""
        self._rng = rng
        self._conventions = conventions
        self._games = []
        for _ in range(count):
            seed = int(rng.integers(2**31))
            self._games.append(_load(game, seed, conventions.sticky))
        self._actions = self._games[0].getMinimalActionSet()
        height, width = self._games[0].getScreenDims()
        self._screens = np.zeros((count, 2, height, width), np.uint8)
        self._moves = np.zeros(count, np.int64)
        self.actions: int = len(self._actions)
        self.observations = np.zeros((count, *SHAPE), np.uint8)
        self.behind = np.zeros(count, np.uint8)
        self._begin(np.ones(count, bool))
        self._observe()

    def step(self, actions: np.ndarray) -> Outcome:
        """Makes a move in each game; actions are whole numbers below `actions`, [count]."""
        rewards = []
        for number, action in enumerate(actions):
            rewards.append(self._play(number, self._actions[action]))
        ended = np.array([game.game_over() for game in self._games])
        self._moves += 1
        is_too_long = self._moves >= self._conventions.longest
        cut = is_too_long & ~ended
        self.observations = np.roll(self.observations, -1, axis=-1)
        self.behind = np.minimum(self.behind + 1, STACK - 1).astype(np.uint8)
        self._begin(ended | cut)
        self._observe()
        return Outcome(np.array(rewards), ended, cut)

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next moves depend on, but the generator."""
        arrays = {'observations': self.observations, 'behind': self.behind, 'moves': self._moves}
        for number, game in enumerate(self._games):
            state = game.cloneState(include_rng=True).serialize()
            arrays[f'game{number}'] = np.frombuffer(state, np.uint8)
        return arrays

    def set_state(self, arrays: Any) -> None:
        """Goes on from the `state` of as many emulators of the same game."""
        for number, game in enumerate(self._games):
            state = arrays[f'game{number}'].tobytes()
            game.restoreState(_ale().ALEState(state))
        self.observations = np.array(arrays['observations'])
        self.behind = np.array(arrays['behind'])
        self._moves = np.array(arrays['moves'])

    def _play(self, number: int, action: Any) -> float:
        """The change of the score while an action is held; the last two frames are kept."""
        game = self._games[number]
        reward = 0.0
        skip = self._conventions.frame_skip
        for frame in range(skip):
            reward += game.act(action)
            if game.game_over():
                break
            if frame >= skip - 2:
                game.getScreenGrayscale(self._screens[number, frame % 2])
        return reward

    def _observe(self) -> None:
        """Writes the newest frame of each game, the maximum of its last two screens."""
        newest = self._screens.max(axis=1)
        self.observations[..., -1] = resize(newest)

    def _begin(self, which: np.ndarray) -> None:
        """Begins some of the games anew."""
        self.observations[which] = 0
        self._moves[which] = self.behind[which] = 0
        for number in np.flatnonzero(which):
            game = self._games[number]
            game.reset_game()
            no_ops = self._rng.integers(self._conventions.no_ops + 1)
            for _ in range(no_ops):
                game.act(self._actions[0])
            self._screens[number, 1] = 0
            game.getScreenGrayscale(self._screens[number, 0])


def resize(screens: np.ndarray) -> np.ndarray:
    """Shrinks gray screens to uint8[n, 84, 84]; each new pixel is the mean over its area."""
    of_columns = _means(screens).swapaxes(1, 2)
    shrunk = _means(of_columns).swapaxes(1, 2)
    return np.rint(shrunk).astype(np.uint8)


def games() -> dict[str, str]:
    """The games by name, such as 'MsPacman', with the file's name in ale-py."""
    names = {}
    for file_name in _ale().roms.get_all_rom_ids():
        words = file_name.split('_')
        name = ''.join(word.capitalize() for word in words)
        names[name] = file_name
    return names


def check_game(name: str) -> str:
    """The file's name of a game in ale-py; a `ValueError` for an unknown game.

    >>> check_game('Pong')
    'pong'
    """
    file_names = games()
    if name not in file_names:
        raise ValueError(
            f'data: the Arcade Learning Environment has no game {name!r}; '
            f'{tree_lib.nearest(name, file_names)}'
        )
    return file_names[name]


@functools.cache
def count_actions(name: str) -> int:
    """How many actions a game knows."""
    return len(_load(name, 0, 0.0).getMinimalActionSet())


def play_games(
    emulators: Emulators,
    values: Callable[[np.ndarray], np.ndarray],
    epsilon: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Plays one whole game in each emulator: the sums of unclipped rewards, float64[count]."""
    sums = np.zeros(len(emulators.observations))
    is_playing = np.ones(len(sums), bool)
    while is_playing.any():
        actions = choose(emulators, values, epsilon, rng)
        outcome = emulators.step(actions)
        sums += outcome.reward * is_playing
        is_playing &= ~(outcome.ended | outcome.cut)
    return sums


def choose(
    emulators: Emulators,
    values: Callable[[np.ndarray], np.ndarray],
    epsilon: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Picks the best action in each game, or with a probability of epsilon any: int64[count].

    `values` maps observations to float[count, actions]; it is not asked where it has no effect.
    """
    count = len(emulators.observations)
    is_random = rng.random(count) < epsilon
    random = rng.integers(emulators.actions, size=count)
    if is_random.all():
        return random
    action_values = np.asarray(values(emulators.observations))
    best = action_values.argmax(axis=-1)
    return np.where(is_random, random, best)


def _means(pixels: np.ndarray) -> np.ndarray:
    """Means over 84 equal parts of the second axis, from cumulative sums up to their edges."""
    # Not as a matrix product: on a busy machine the threads of BLAS wait a hundred times as long.
    size = pixels.shape[1]
    edges = np.arange(SIZE + 1) * (size / SIZE)
    pixel = edges.astype(int)  # in which an edge lies
    share = (edges - pixel).astype(np.float32)[:, None]  # of that pixel before the edge
    sums = np.zeros((len(pixels), size + 1, pixels.shape[2]), np.float32)
    np.cumsum(pixels, axis=1, out=sums[:, 1:])
    cut_pixels = pixels[:, np.minimum(pixel, size - 1)]
    up_to_edges = sums[:, pixel] + cut_pixels * share
    sums_of_parts = np.diff(up_to_edges, axis=1)
    return sums_of_parts * np.float32(SIZE / size)


def _load(name: str, seed: int, sticky: float) -> Any:
    ale = _ale()
    game = ale.ALEInterface()
    game.setInt('random_seed', seed)
    game.setFloat('repeat_action_probability', sticky)
    game.loadROM(ale.roms.get_rom_path(check_game(name)))
    return game


@functools.cache
def _ale() -> Any:
    """The package of the games, imported here so that the other workloads do without."""
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise ImportError(
            f"dqn plays Atari games of ale-py ({error}): pip install 'jaxpruner[games]'"
        ) from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return ale_py


_ENDED = 1
_CUT = 2


class FrameReplay:
    """The newest moves of several games: a row for each move, a column for each game."""

    def __init__(self, capacity: int, count: int):
        """Makes an empty buffer of a capacity in moves, in all games together."""
        self._rows = capacity // count
        self._added = 0  # rows, ever
        shape = self._rows, count
        self.frames = np.zeros((*shape, SIZE, SIZE), np.uint8)  # the newest before the move
        self.behind = np.zeros(shape, np.uint8)  # frames of the same game before it, at most 3
        self.action = np.zeros(shape, np.uint8)
        self.reward = np.zeros(shape, np.float32)  # clipped to [-1, 1]
        self.ending = np.zeros(shape, np.uint8)  # 1 where the game ended, 2 where it was cut off

    def __len__(self) -> int:
        """How many moves were ever added."""
        return self._added * self.frames.shape[1]

    def play(self, emulators: Emulators, actions: np.ndarray) -> Outcome:
        """Makes a move in each game and keeps it, in place of the oldest."""
        row = self._added % self._rows
        self.frames[row] = emulators.observations[..., -1]
        self.behind[row] = emulators.behind
        outcome = emulators.step(actions)
        self.action[row] = actions
        self.reward[row] = np.clip(outcome.reward, -1, 1)
        self.ending[row] = _ENDED * outcome.ended + _CUT * outcome.cut
        self._added += 1
        return outcome

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """Draws moves uniformly, with repetition, as transitions of NumPy arrays."""
        rows, games = self._draw(rng, size)
        # The next frame of a game that was cut off is not kept: its last move is drawn again.
        while (is_cut := self.ending[rows % self._rows, games] == _CUT).any():
            cut_moves = int(is_cut.sum())
            rows[is_cut], games[is_cut] = self._draw(rng, cut_moves)
        moves = rows % self._rows, games
        drawn: dict[str, Any] = {
            'observation': self._stacked(rows, games),
            'action': self.action[moves].astype(np.int32),
            'reward': self.reward[moves],
            'next_observation': self._stacked(rows + 1, games),
            'terminal': self.ending[moves] == _ENDED,
        }
        return Transitions(**drawn)

    def kept(self) -> dict[str, np.ndarray]:
        """The rows that are in use, by the names of the arrays; no copies."""
        rows = min(self._added, self._rows)
        arrays = {
            'frames': self.frames,
            'behind': self.behind,
            'action': self.action,
            'reward': self.reward,
            'ending': self.ending,
        }
        return {name: array[:rows] for name, array in arrays.items()}

    def restore(self, arrays: Mapping[str, np.ndarray], moves: int) -> None:
        """Becomes what another buffer was, from its `kept` and its length."""
        self._added = moves // self.frames.shape[1]
        for name, own in self.kept().items():
            given = arrays[name]
            if given.shape != own.shape:
                raise ValueError(f'{name} has the shape {given.shape} where {own.shape} belongs')
            own[:] = given

    def _draw(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and games.

        The newest row has no next frame yet, and the oldest may have lost the frames behind it.
        """
        overwritten = max(0, self._added - self._rows)
        first = overwritten + STACK - 1 if overwritten else 0
        rows = rng.integers(first, self._added - 1, size)
        games = rng.integers(self.frames.shape[1], size=size)
        return rows, games

    def _stacked(self, rows: np.ndarray, games: np.ndarray) -> np.ndarray:
        """The frames of rows and those behind them of the same game, the oldest first."""
        back = np.arange(STACK)[::-1]
        frame_rows = (rows[:, None] - back) % self._rows
        frames = self.frames[frame_rows, games[:, None]]
        behind = self.behind[rows % self._rows, games]
        frames[back > behind[:, None]] = 0
        return np.moveaxis(frames, 1, -1)


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
