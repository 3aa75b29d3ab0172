"""The replay buffer of games that are played on the host: keeps each frame once and puts observations together."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.baselines.atari import STACK, Emulators, Outcome
from jaxpruner.baselines.device_replay import Transitions

_OVER, _CUT = 1, 2


class FrameReplay:
    """The newest moves of several games: a row for each move, a column for each game."""

    def __init__(self, capacity: int, count: int):
        """Makes an empty buffer."""
        self._rows = capacity // count
        self._added = 0  # rows, ever
        moves = self._rows, count
        self.frames = np.zeros((*moves, 84, 84), np.uint8)  # the newest frame before the move
        self.behind = np.zeros(
            moves, np.uint8
        )  # how many of the frames before it belong to the same game, at most 3
        self.action = np.zeros(moves, np.uint8)
        self.reward = np.zeros(moves, np.float32)
        self.ending = np.zeros(moves, np.uint8)  # 1 where the game ended, 2 where it was cut off

    def __len__(self) -> int:
        """How many moves were ever added."""
        return self._added * self.frames.shape[1]

    def play(self, emulators: Emulators, actions: np.ndarray) -> Outcome:
        """Makes a move in each game and keeps it, in place of the oldest."""
        row = self._added % self._rows
        self.frames[row], self.behind[row] = emulators.observations[..., -1], emulators.behind
        outcome = emulators.step(actions)
        self.action[row], self.reward[row] = actions, np.clip(outcome.reward, -1, 1)
        self.ending[row] = _OVER * outcome.over + _CUT * outcome.cut
        self._added += 1
        return outcome

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """Draws moves, each as likely, with repetition."""
        rows, games = self._draw(rng, size)
        # After the last move of a game nothing was kept: what this draws of a cut game has no meaning.
        while (cut := self.ending[rows % self._rows, games] == _CUT).any():
            rows[cut], games[cut] = self._draw(rng, int(cut.sum()))
        at = rows % self._rows, games
        drawn: dict[str, Any] = {
            'observation': self._stacked(rows, games),
            'action': self.action[at].astype(np.int32),
            'reward': self.reward[at],
            'next_observation': self._stacked(rows + 1, games),
            'terminal': self.ending[at] == _OVER,
        }
        return Transitions(**drawn)

    def kept(self) -> dict[str, np.ndarray]:
        """The rows that are in use, by the names of the arrays; no copies."""
        rows = min(self._added, self._rows)
        return {
            name: getattr(self, name)[:rows]
            for name in ('frames', 'behind', 'action', 'reward', 'ending')
        }

    def restore(self, arrays: Mapping[str, np.ndarray], moves: int) -> None:
        """Becomes what another buffer was."""
        self._added = moves // self.frames.shape[1]
        for name, own in self.kept().items():
            if arrays[name].shape != own.shape:
                raise ValueError(
                    f'{name} has the shape {arrays[name].shape} where {own.shape} belongs'
                )
            own[:] = arrays[name]

    def _draw(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and games; the newest has no next frame yet, and the oldest may have lost the frames behind it."""
        overwritten = max(0, self._added - self._rows)
        first = overwritten + STACK - 1 if overwritten else 0
        return rng.integers(first, self._added - 1, size), rng.integers(
            self.frames.shape[1], size=size
        )

    def _stacked(self, rows: np.ndarray, games: np.ndarray) -> np.ndarray:
        """The frames of rows and those behind them that belong to the same game, the oldest first."""
        back = np.arange(STACK)[::-1]
        frames = self.frames[(rows[:, None] - back) % self._rows, games[:, None]]
        frames[back > self.behind[rows % self._rows, games][:, None]] = 0
        return np.moveaxis(frames, 1, -1)
