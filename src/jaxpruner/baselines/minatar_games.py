"""MinAtar's games of gymnax, several at a time, inside compiled programs."""

from typing import Any

import jax

from jaxpruner.baselines.device_replay import Transitions


class Games:
    """A game by its name in gymnax, played several times at once."""

    def __init__(self, name: str):
        """Finds the game."""
        gymnax = _gymnax()
        known = [game for game in gymnax.registered_envs if game.endswith('MinAtar')]
        if name not in known:
            raise ValueError(
                f"dqn plays MinAtar's games, not {name!r}: set data to one of {', '.join(known)}"
            )
        self._game, self._settings = gymnax.make(name)
        self.shape: tuple[int, ...] = self._game.observation_space(self._settings).shape
        self.actions: int = self._game.num_actions

    def reset(self, key: jax.Array, count: int) -> tuple[jax.Array, Any]:
        """Begins games."""
        return jax.vmap(self._game.reset, (0, None))(jax.random.split(key, count), self._settings)

    def play(
        self, key: jax.Array, states: Any, observations: jax.Array, actions: jax.Array
    ) -> tuple[jax.Array, Any, Transitions, jax.Array]:
        """Makes one move in each game; one that ends begins anew."""
        keys = jax.random.split(key, len(actions))
        after, states, rewards, terminal, truncated, info = jax.vmap(
            self._game.step, (0, 0, 0, None)
        )(keys, states, actions, self._settings)
        new = Transitions(observations, actions, rewards, info['final_observation'], terminal)
        return after, states, new, terminal | truncated


def _gymnax() -> Any:
    """The package of the games; imported here, so that the other workloads do without."""
    try:
        import gymnax
    except ImportError as error:
        raise ImportError(
            f"dqn plays games of gymnax ({error}): pip install 'jaxpruner[games]'"
        ) from error
    return gymnax
