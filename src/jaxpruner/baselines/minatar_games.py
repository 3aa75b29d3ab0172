"""MinAtar's games of gymnax, several at a time, inside compiled programs."""

from typing import Any

import jax

from jaxpruner.baselines.device_replay import Transitions


class Games:
    """A game by its name in gymnax, played several times at once.

    >>> games = Games('Breakout-MinAtar')
    >>> games.shape, games.actions
    ((10, 10, 4), 3)
    """

    def __init__(self, name: str):
        """Finds one of MinAtar's games; `ValueError` for others, `ImportError` without gymnax."""
        gymnax = _import_gymnax()
        names = [game for game in gymnax.registered_envs if game.endswith('MinAtar')]
        if name not in names:
            raise ValueError(
                f"dqn plays MinAtar's games, not {name!r}: set data to one of {', '.join(names)}"
            )
        self._game, self._settings = gymnax.make(name)
        self.shape: tuple[int, ...] = self._game.observation_space(self._settings).shape
        self.actions: int = self._game.num_actions

    def reset(self, key: jax.Array, count: int) -> tuple[jax.Array, Any]:
        """Begins games: observations float32[count, height, width, channels], and states."""
        keys = jax.random.split(key, count)
        return jax.vmap(self._game.reset, (0, None))(keys, self._settings)

    def play(
        self, key: jax.Array, states: Any, observations: jax.Array, actions: jax.Array
    ) -> tuple[jax.Array, Any, Transitions, jax.Array]:
        """Makes one move in each game; one that ends begins anew.

        Returns observations, states, the transitions, and bool[count] for games that ended or
        reached their time limit.
        """
        keys = jax.random.split(key, len(actions))
        step = jax.vmap(self._game.step, (0, 0, 0, None))
        after, states, rewards, terminal, truncated, info = step(
            keys, states, actions, self._settings
        )
        new = Transitions(observations, actions, rewards, info['final_observation'], terminal)
        return after, states, new, terminal | truncated


def _import_gymnax() -> Any:
    """The package of the games, imported here so that the other workloads do without."""
    try:
        import gymnax
    except ImportError as error:
        raise ImportError(
            f"dqn plays games of gymnax ({error}): pip install 'jaxpruner[games]'"
        ) from error
    return gymnax
