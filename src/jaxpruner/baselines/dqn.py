"""The workload `dqn`: a deep Q-network plays MinAtar's games on the device, or Atari's on the host.

DQN is that of Mnih et al. 2015 (https://doi.org/10.1038/nature14236) with Adam and the Huber loss. The games and the
network of MinAtar (Young and Tian 2019, https://arxiv.org/abs/1903.03176) are those of gymnax (Lange 2022), with a
replay buffer inside the compiled program; `atari` has the others.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpruner.baselines import atari
from jaxpruner.baselines.atari import Transitions, exploration
from jaxpruner.baselines.data import check_no_folder, imported
from jaxpruner.baselines.models import ConvNet, Functional
from jaxpruner.baselines.recipe import Recipe, read_presets
from jaxpruner.baselines.task import Carry, Metric, Metrics, Task, Workload, gradient_step, step_key


class DQNWorkload(Workload):
    """Deep Q-learning; the metric is the mean return of whole games, played almost greedily.

    The preset `default` plays MinAtar's Breakout: a step is one move in each environment and one
    update. `atari`, which is small, and `full` play MsPacman: a step is `task.moves` moves and one
    update.
    """

    name = 'dqn'
    recipes = read_presets('dqn')

    def data(self, recipe: Recipe, data_dir: Path | None) -> None:
        """There is none: the game makes it. A `ValueError` for an unknown game, or for a folder."""
        check_no_folder(recipe.data, data_dir)
        if _is_atari(recipe):
            atari.check_game(recipe.data)
        else:
            _minatar_game(recipe)

    def task(self, recipe: Recipe, data: None = None) -> Task:
        """The training; a `ValueError` for an unknown game or numbers that do not fit together.

        In `recipe.task`, `epsilon_until` is a share of the steps, `replay` and `replay_start`
        (moves of random play before the first update) are transitions, `target_every` is updates.
        """
        _check_numbers(recipe)
        if _is_atari(recipe):
            return _atari_task(recipe)
        playing = _Playing(recipe, *_minatar_game(recipe))
        return Task(
            metric=Metric('return', 'high'),
            init=playing.learning.network.init_params,
            init_state=playing.init_state,
            loss=playing.learning.loss,
            evaluate=playing.evaluate,
            step=playing.step,
        )


def _is_atari(recipe: Recipe) -> bool:
    return 'frame_skip' in recipe.task


def _check_numbers(recipe: Recipe) -> None:
    """Refuses numbers that do not fit together; the error names the key and what it must be."""
    numbers, count = recipe.task, recipe.task['environments']
    for name in ('replay', 'replay_start', 'moves'):
        moves = numbers.get(name, count)
        if count < 1 or moves < 1 or moves % count:
            raise ValueError(f'task.{name} {moves} must be a multiple of task.environments {count}')
    if _is_atari(recipe) and numbers['replay'] < 8 * count:
        raise ValueError(
            f'task.replay {numbers["replay"]} must hold 8 moves of each of {count} environments'
        )


def _atari_task(recipe: Recipe) -> Task:
    """The training on an Atari game, which is played on the host."""
    actions = int(atari.make_games(recipe, 1, 1).single_action_space.n)
    learning = _DeepQLearning(recipe, atari.SHAPE, actions)

    def evaluate_host(values, seed):
        returns = atari.returns(recipe, values, seed, recipe.task['test_epsilon'])
        return {'return': float(returns.mean())}

    return Task(
        metric=Metric('return', 'high'),
        init=learning.network.init_params,
        init_state=lambda params, key: _TargetNetwork(params),
        loss=learning.loss,
        step=learning.update,
        feed=lambda seed: atari.AtariFeed(recipe, seed),
        values=lambda params, state, observations: learning.values(params, observations),
        evaluate_host=evaluate_host,
    )


class _TargetNetwork(NamedTuple):
    """What DQN carries besides the trained parameters where the host plays."""

    target: Any  # parameters of the target network


@dataclasses.dataclass(frozen=True)
class _DeepQLearning:
    """The functions of a task that learns by DQN; the carried state has a field `target`."""

    recipe: Recipe
    shape: tuple[int, ...]  # of an observation
    actions: int

    @functools.cached_property
    def network(self) -> Functional:
        """The values of actions as a function of parameters and observations."""
        settings: Any = {**self.recipe.model, 'dtype': jnp.dtype(self.recipe.dtype)}
        shape, actions = self.shape, self.actions
        return Functional(lambda rngs: ConvNet(shape, outputs=actions, **settings, rngs=rngs))

    def values(self, params: Any, observations: jax.Array) -> jax.Array:
        """The value of each action, float32[n, actions]."""
        return self.network.module(params)(observations)

    def loss(self, params: Any, state: Any, batch: Transitions, key: Any) -> tuple[jax.Array, Any]:
        """The mean Huber loss of the values of the actions that were taken; the state stays."""
        del key
        best_values = self.values(state.target, batch.next_observation).max(axis=-1)
        future = jnp.where(batch.terminal, 0.0, best_values)
        targets = batch.reward + self.recipe.task['discount'] * future
        values = self.values(params, batch.observation)
        taken = jnp.take_along_axis(values, batch.action[:, None], axis=-1)
        return optax.huber_loss(taken[:, 0], targets).mean(), state

    def update(
        self, updater: Any, tx: Any, carry: Carry, number: jax.Array, batch: Transitions
    ) -> Carry:
        """An update of the optimizer and, when it is due, of the target network."""
        state = carry.state
        carry = gradient_step(
            updater, tx, carry, lambda params: self.loss(params, state, batch, None)
        )
        newest = updater.pre_forward_update(carry.params, carry.opt_state)
        is_due = number % self.recipe.task['target_every'] == 0
        target = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), newest, state.target)
        return carry._replace(state=state._replace(target=target))


# MinAtar's games, on the device.


def _minatar_game(recipe: Recipe) -> tuple[Any, Any]:
    """The recipe's game of gymnax, and its settings; a `ValueError` for another."""
    gymnax = imported('gymnax', 'games of MinAtar', extra='games')
    names = [game for game in gymnax.registered_envs if game.endswith('MinAtar')]
    if recipe.data not in names:
        raise ValueError(
            f"dqn plays MinAtar's games, not {recipe.data!r}: set data to one of {', '.join(names)}"
        )
    return gymnax.make(recipe.data)


class _Agent(NamedTuple):
    """What DQN carries besides the trained parameters."""

    target: Any  # parameters of the target network
    games: Any  # the environments' states, a leading axis of `environments`
    observations: jax.Array  # float32[environments, height, width, channels]
    replay: Transitions  # the newest moves, in a ring; bool observations


@dataclasses.dataclass(frozen=True)
class _Playing:
    """The functions of a task that differ from those of games on the host."""

    recipe: Recipe
    game: Any
    settings: Any  # of the game

    @functools.cached_property
    def learning(self) -> _DeepQLearning:
        shape = self.game.observation_space(self.settings).shape
        return _DeepQLearning(self.recipe, shape, self.game.num_actions)

    def init_state(self, params: Any, key: jax.Array) -> _Agent:
        """Fills the buffer by random play."""
        count, capacity = self.recipe.task['environments'], self.recipe.task['replay']
        key_reset, key_play = jax.random.split(key)
        observations, games = self._reset(key_reset, count)

        def move(number, agent):
            key = jax.random.fold_in(key_play, number)
            no_values = jnp.zeros((count, self.game.num_actions))
            return self._move(jax.random.split(key), agent, no_values, 1.0, number * count)

        seen = jnp.zeros((capacity, *self.learning.shape), bool)
        replay = Transitions(
            observation=seen,
            action=jnp.zeros(capacity, jnp.int32),
            reward=jnp.zeros(capacity, jnp.float32),
            next_observation=seen,
            terminal=jnp.zeros(capacity, bool),
        )
        agent = _Agent(params, games, observations, replay)
        return jax.lax.fori_loop(0, self.recipe.task['replay_start'] // count, move, agent)

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A move in each environment, and an update."""
        *keys, key_sample = jax.random.split(step_key(carry.key, number), 3)
        agent = carry.state
        forward = updater.pre_forward_update(carry.params, carry.opt_state)
        values = self.learning.values(forward, agent.observations)
        inserted = self.recipe.task['replay_start'] + number * len(values)
        agent = self._move(keys, agent, values, exploration(self.recipe, number), inserted)
        filled = jnp.minimum(inserted + len(values), self.recipe.task['replay'])
        drawn = jax.random.randint(key_sample, (self.recipe.batch_size,), 0, filled)
        batch = jax.tree.map(lambda kept: kept[drawn], agent.replay)
        return self.learning.update(updater, tx, carry._replace(state=agent), number, batch)

    def evaluate(self, params: Any, state: Any) -> Metrics:
        """Plays whole games at the same time; the mean of the sums of their rewards."""
        del state
        count = self.recipe.task['test_games']
        key_reset, key_play = jax.random.split(jax.random.key(0))
        observations, games = self._reset(key_reset, count)

        def move(now):
            number, games, observations, sums, is_playing = now
            keys = jax.random.split(jax.random.fold_in(key_play, number))
            values = self.learning.values(params, observations)
            actions = _explore(keys[0], values, self.recipe.task['test_epsilon'])
            observations, games, new, ended = self._play(keys[1], games, observations, actions)
            sums += new.reward * is_playing
            return number + 1, games, observations, sums, is_playing & ~ended

        start = 0, games, observations, jnp.zeros(count), jnp.ones(count, bool)
        _, _, _, sums, _ = jax.lax.while_loop(lambda now: now[-1].any(), move, start)
        return {'return': sums.mean()}

    def _move(self, keys: Any, agent: _Agent, values: Any, epsilon: Any, inserted: Any) -> _Agent:
        """A move in each environment, put in place of the oldest ones; `inserted` were ever inserted."""
        actions = _explore(keys[0], values, epsilon)
        after, games, new, _ = self._play(keys[1], agent.games, agent.observations, actions)
        # Both are multiples of the number of environments.
        start = inserted % self.recipe.task['replay']

        def write(kept, values):
            values = values.astype(kept.dtype)
            return jax.lax.dynamic_update_slice_in_dim(kept, values, start, axis=0)

        return _Agent(agent.target, games, after, jax.tree.map(write, agent.replay, new))

    def _reset(self, key: jax.Array, count: int) -> tuple[jax.Array, Any]:
        """Begins games: observations float32[count, height, width, channels], and states."""
        keys = jax.random.split(key, count)
        return jax.vmap(self.game.reset, (0, None))(keys, self.settings)

    def _play(
        self, key: jax.Array, games: Any, observations: jax.Array, actions: jax.Array
    ) -> tuple[jax.Array, Any, Transitions, jax.Array]:
        """Makes one move in each game; one that ends, or is cut off for its length, begins anew.

        Returns observations, states, the transitions, and bool[count] for games that are over.
        """
        keys = jax.random.split(key, len(actions))
        step = jax.vmap(self.game.step, (0, 0, 0, None))
        after, games, rewards, terminal, is_cut, info = step(keys, games, actions, self.settings)
        new = Transitions(observations, actions, rewards, info['final_observation'], terminal)
        return after, games, new, terminal | is_cut


def _explore(key: jax.Array, values: jax.Array, epsilon: jax.Array | float) -> jax.Array:
    """Picks the best action, or with a probability of epsilon any: int32[n]."""
    key_choice, key_action = jax.random.split(key)
    count, actions = values.shape
    random = jax.random.randint(key_action, (count,), 0, actions)
    is_random = jax.random.uniform(key_choice, (count,)) < epsilon
    return jnp.where(is_random, random, values.argmax(axis=-1)).astype(jnp.int32)
