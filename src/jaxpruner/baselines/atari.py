"""Atari games of the Arcade Learning Environment (ale-py, whose wheel holds the games), in lock-step.

Frames are those of Dopamine (Castro et al. 2018, https://arxiv.org/abs/1812.06110), which follows
Machado et al. 2018 (https://doi.org/10.1613/jair.5699): gray, the maximum of the last two of four
frames, 84 x 84 by area, sticky actions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib

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
        arrays = {
            'observations': self.observations,
            'behind': self.behind,
            'moves': self._moves,
        }
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
