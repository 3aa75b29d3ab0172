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
from jaxpruner.baselines.metrics import Metrics
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
    capacity = numbers['replay']
    random_moves = numbers['replay_start']
    if capacity % count or random_moves % count or random_moves < 1:
        raise ValueError(
            f'task.replay {capacity} and task.replay_start {random_moves} must be multiples of '
            f'task.environments {count}'
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
    best = values.argmax(axis=-1)
    random = jax.random.randint(key_action, (count,), 0, actions)
    is_random = jax.random.uniform(key_choice, (count,)) < epsilon
    return jnp.where(is_random, random, best).astype(jnp.int32)


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

    def move(now: _Evaluation) -> _Evaluation:
        key = jax.random.fold_in(key_play, now.number)
        key_action, key_game = jax.random.split(key)
        actions = explore(key_action, values(now.observations), epsilon)
        after, games, new, ended = game.play(key_game, now.games, now.observations, actions)
        return _Evaluation(
            number=now.number + 1,
            games=games,
            observations=after,
            sums=now.sums + new.reward * now.is_playing,
            is_playing=now.is_playing & ~ended,
        )

    start = _Evaluation(
        number=0,
        games=games,
        observations=observations,
        sums=jnp.zeros(count),
        is_playing=jnp.ones(count, bool),
    )
    end = jax.lax.while_loop(lambda now: now.is_playing.any(), move, start)
    return end.sums


class _Evaluation(NamedTuple):
    """Whole games that are played at the same time."""

    number: Any  # of the move
    games: Any  # the environments' states
    observations: jax.Array
    sums: jax.Array  # float32[count]: rewards so far
    is_playing: jax.Array  # bool[count]


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
            key = jax.random.fold_in(key_play, number)
            key_action, key_game = jax.random.split(key)
            no_values = jnp.zeros((count, self.game.actions))
            actions = explore(key_action, no_values, 1.0)
            return self._play(key_game, agent, actions, number * count)

        capacity = self.numbers['replay']
        replay = device_replay.empty(capacity, self.game.shape)
        agent = Agent(params, games, observations, replay)
        moves = self.numbers['replay_start'] // count
        return jax.lax.fori_loop(0, moves, move, agent)

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A move in each environment, and an update."""
        key = step_key(carry.key, number)
        key_action, key_game, key_sample = jax.random.split(key, 3)
        params, agent, opt_state, _ = carry
        forward = updater.pre_forward_update(params, opt_state)
        values = self.learning.values(forward, agent.observations)
        epsilon = exploration(self.recipe, number)
        actions = explore(key_action, values, epsilon)
        before = self.numbers['replay_start'] + number * len(actions)
        agent = self._play(key_game, agent, actions, before)
        inserted = before + len(actions)
        size = self.recipe.batch_size
        batch = device_replay.sample(key_sample, agent.replay, inserted, size)
        carry = carry._replace(state=agent)
        return self.learning.update(updater, tx, carry, number, batch)

    def evaluate(self, params: Any, state: Any) -> Metrics:
        del state
        count = self.numbers['test_games']
        epsilon = self.numbers['test_epsilon']
        values = functools.partial(self.learning.values, params)
        sums = returns(jax.random.key(0), self.game, values, count, epsilon)
        return {'return': sums.mean()}

    def _play(self, key: jax.Array, agent: Agent, actions: jax.Array, before: Any) -> Agent:
        """A move in each environment; `before` transitions were ever inserted."""
        after, games, new, _ = self.game.play(key, agent.games, agent.observations, actions)
        replay = device_replay.insert(agent.replay, new, before)
        return Agent(agent.target, games, after, replay)
