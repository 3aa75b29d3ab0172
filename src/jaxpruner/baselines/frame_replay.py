"""The replay buffer of games on the host: keeps each frame once and puts observations together."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.baselines.atari import SIZE, STACK, Emulators, Outcome
from jaxpruner.baselines.device_replay import Transitions

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
