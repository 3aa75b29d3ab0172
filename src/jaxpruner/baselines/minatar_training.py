"""DQN on MinAtar's games: environments and replay inside the compiled program.

The games and the network are those of MinAtar (Young and Tian 2019,
https://arxiv.org/abs/1903.03176) as gymnax has them (Lange 2022).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.baselines import device_replay
from jaxpruner.baselines.dqn_learning import DeepQLearning, exploration
from jaxpruner.baselines.minatar_games import Games
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Metric, Task, step_key


class Agent(NamedTuple):
    """What DQN carries besides the trained parameters."""

    target: Any  # parameters of the target network
    games: Any  # the environments' states, a leading axis of `environments`
    observations: jax.Array  # float32[environments, height, width, channels]
    replay: Any  # Transitions


def minatar_task(recipe: Recipe) -> Task:
    """The training on one of MinAtar's games; `ValueError` for numbers that do not fit."""
    numbers: Any = recipe.task
    count = numbers['environments']
    if numbers['replay'] % count or numbers['replay_start'] % count or numbers['replay_start'] < 1:
        raise ValueError(
            f'task.replay {numbers["replay"]} and task.replay_start {numbers["replay_start"]} '
            f'must be multiples of task.environments {count}'
        )
    game = Games(recipe.data)
    learning = DeepQLearning(recipe, game.shape, game.actions)
    playing = _Playing(recipe, game, learning)
    return Task(
        metric=Metric('return', 'high'),
        steps=recipe.steps,
        init=learning.init,
        init_state=playing.init_state,
        loss=learning.loss,
        evaluate=playing.evaluate,
        step=playing.step,
    )


def explore(key: jax.Array, values: jax.Array, epsilon: jax.Array | float) -> jax.Array:
    """Picks the best action, or with a probability of epsilon any: int32[n].

    >>> explore(jax.random.key(0), jnp.array([[0.0, 1.0], [1.0, 0.0]]), 0.0).tolist()
    [1, 0]
    """
    key_choice, key_action = jax.random.split(key)
    count, actions = values.shape
    random = jax.random.randint(key_action, (count,), 0, actions)
    is_random = jax.random.uniform(key_choice, (count,)) < epsilon
    return jnp.where(is_random, random, values.argmax(axis=-1)).astype(jnp.int32)


def returns(
    key: jax.Array,
    game: Games,
    values: Callable[[jax.Array], jax.Array],
    count: int,
    epsilon: float,
) -> jax.Array:
    """Plays whole games at the same time: the sum of the rewards of each, float32[count]."""
    key_reset, key_play = jax.random.split(key)
    observations, games = game.reset(key_reset, count)

    def move(now):
        number, games, observations, sums, is_playing = now
        key_action, key_game = jax.random.split(jax.random.fold_in(key_play, number))
        actions = explore(key_action, values(observations), epsilon)
        after, games, new, ended = game.play(key_game, games, observations, actions)
        return number + 1, games, after, sums + new.reward * is_playing, is_playing & ~ended

    start = 0, games, observations, jnp.zeros(count), jnp.ones(count, bool)
    return jax.lax.while_loop(lambda now: now[-1].any(), move, start)[3]


@dataclasses.dataclass(frozen=True)
class _Playing:
    """The functions of a task that differ from those of games on the host."""

    recipe: Recipe
    game: Games
    learning: DeepQLearning

    @property
    def numbers(self) -> Any:
        return self.recipe.task

    def init_state(self, params: Any, key: jax.Array) -> Agent:
        """Fills the buffer by random play."""
        count = self.numbers['environments']
        key_reset, key_play = jax.random.split(key)
        observations, games = self.game.reset(key_reset, count)

        def move(number, agent):
            key_action, key_game = jax.random.split(jax.random.fold_in(key_play, number))
            actions = explore(key_action, jnp.zeros((count, self.game.actions)), 1.0)
            return self._play(key_game, agent, actions, number * count)

        replay = device_replay.empty(self.numbers['replay'], self.game.shape)
        agent = Agent(params, games, observations, replay)
        return jax.lax.fori_loop(0, self.numbers['replay_start'] // count, move, agent)

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A move in each environment, and an update."""
        key_action, key_game, key_sample = jax.random.split(step_key(carry.key, number), 3)
        params, agent, opt_state, _ = carry
        forward = updater.pre_forward_update(params, opt_state)
        values = self.learning.values(forward, agent.observations)
        actions = explore(key_action, values, exploration(self.recipe, number))
        before = self.numbers['replay_start'] + number * len(actions)
        agent = self._play(key_game, agent, actions, before)
        inserted, size = before + len(actions), self.recipe.batch_size
        batch = device_replay.sample(key_sample, agent.replay, inserted, size)
        return self.learning.update(updater, tx, carry._replace(state=agent), number, batch)

    def evaluate(self, params: Any, state: Any) -> dict[str, jax.Array]:
        del state
        count, epsilon = self.numbers['test_games'], self.numbers['test_epsilon']
        values = functools.partial(self.learning.values, params)
        key = jax.random.key(0)
        return {'return': returns(key, self.game, values, count, epsilon).mean()}

    def _play(self, key: jax.Array, agent: Agent, actions: jax.Array, before: Any) -> Agent:
        """A move in each environment; `before` transitions were ever inserted."""
        after, games, new, _ = self.game.play(key, agent.games, agent.observations, actions)
        replay = device_replay.insert(agent.replay, new, before)
        return Agent(agent.target, games, after, replay)
