"""DQN, and its games of MinAtar with a replay buffer inside the compiled program.

The games and the network are those of MinAtar (Young and Tian 2019, https://arxiv.org/abs/1903.03176) as gymnax has
them (Lange 2022).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines.models import Functional, QNetwork
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Metric, Metrics, Task, step_key


class Transitions(NamedTuple):
    """What happened in several steps of an environment; the first axis counts them."""

    observation: jax.Array  # bool[n, height, width, channels], or uint8
    action: jax.Array  # int32[n]
    reward: jax.Array  # float32[n]
    next_observation: jax.Array  # like observation; at an end, not of the next game's start
    terminal: jax.Array  # bool[n]; not where a game was cut off for its length


def empty(capacity: int, shape: tuple[int, ...]) -> Transitions:
    """A buffer with nothing in it, for observations of a shape."""
    observations = jnp.zeros((capacity, *shape), bool)
    return Transitions(
        observation=observations,
        action=jnp.zeros(capacity, jnp.int32),
        reward=jnp.zeros(capacity, jnp.float32),
        next_observation=observations,
        terminal=jnp.zeros(capacity, bool),
    )


def insert(replay: Transitions, new: Transitions, before: jax.Array | int) -> Transitions:
    """Puts transitions in place of the oldest; `before` counts those that were ever inserted.

    Both the capacity and `before` are multiples of how many are new.

    >>> replay = Transitions(*[jnp.zeros(4)] * 5)
    >>> insert(replay, Transitions(*[jnp.ones(2)] * 5), before=6).reward.tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    start = before % len(replay.reward)

    def write(old, values):
        values = values.astype(old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, values, start, axis=0)

    return jax.tree.map(write, replay, new)


def sample(
    key: jax.Array, replay: Transitions, inserted: jax.Array | int, size: int
) -> Transitions:
    """Draws transitions uniformly, with repetition; `inserted` were ever inserted, at least one."""
    filled = jnp.minimum(inserted, len(replay.reward))
    positions = jax.random.randint(key, (size,), 0, filled)
    return jax.tree.map(lambda values: values[positions], replay)


class TargetNetwork(NamedTuple):
    """What DQN carries besides the trained parameters where the host plays."""

    target: Any  # parameters of the target network


def target_network(params: Any, key: jax.Array) -> TargetNetwork:
    """The target network at first: the parameters themselves."""
    del key
    return TargetNetwork(params)


@dataclasses.dataclass(frozen=True)
class DeepQLearning:
    """The functions of a task that learns by DQN; the carried state has a field `target`."""

    recipe: Recipe
    shape: tuple[int, ...]  # of an observation
    actions: int

    @functools.cached_property
    def network(self) -> Functional:
        """The values of actions as a function of parameters and observations."""
        settings: Any = {**self.recipe.model, 'dtype': jnp.dtype(self.recipe.dtype)}
        shape, actions = self.shape, self.actions
        return Functional(lambda rngs: QNetwork(shape, actions=actions, **settings, rngs=rngs))

    def init(self, key: jax.Array) -> Any:
        """The parameters of the network."""
        return self.network.init_params(key)

    def values(self, params: Any, observations: jax.Array) -> jax.Array:
        """The value of each action, float32[n, actions]."""
        return self.network.module(params)(observations)

    def loss(
        self, params: Any, state: Any, batch: Transitions, key: Any = None
    ) -> tuple[jax.Array, Any]:
        """The mean Huber loss of the values of the actions that were taken; the state stays."""
        del key
        numbers: Any = self.recipe.task
        next_values = self.values(state.target, batch.next_observation)
        targets = td_targets(batch, next_values, numbers['discount'])
        values = self.values(params, batch.observation)
        taken = jnp.take_along_axis(values, batch.action[:, None], axis=-1)
        losses = optax.huber_loss(taken[:, 0], targets)
        return losses.mean(), state

    def update(
        self, updater: Any, tx: Any, carry: Carry, number: jax.Array, batch: Transitions
    ) -> Carry:
        """An update of the optimizer and, when it is due, of the target network."""
        params, state, opt_state, _ = carry
        numbers: Any = self.recipe.task

        def loss(params):
            forward = updater.pre_forward_update(params, opt_state)
            return self.loss(forward, state, batch)[0]

        grads = jax.grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        newest = updater.pre_forward_update(params, opt_state)
        is_due = number % numbers['target_every'] == 0

        def renew(new, old):
            return jnp.where(is_due, new, old)

        target = jax.tree.map(renew, newest, state.target)
        state = state._replace(target=target)
        return carry._replace(params=params, opt_state=opt_state, state=state)


def td_targets(transitions: Transitions, next_values: jax.Array, discount: float) -> jax.Array:
    """What each action's value should have been: `reward + discount * max(next values)`, float32[n].

    `next_values` is float32[n, actions]; where the game ended the target is the reward alone.

    >>> ended = jnp.array([False, True])
    >>> batch = Transitions(*[jnp.zeros(2)] * 2, jnp.array([1.0, 1.0]), jnp.zeros(2), ended)
    >>> td_targets(batch, jnp.array([[2.0, 4.0], [2.0, 4.0]]), 0.5).tolist()
    [3.0, 1.0]
    """
    best_values = next_values.max(axis=-1)
    future = jnp.where(transitions.terminal, 0.0, best_values)
    return transitions.reward + discount * future


def exploration(recipe: Recipe, number: jax.Array | int) -> Any:
    """The probability of a random action at a step: from 1 linearly to `task.epsilon_end`."""
    numbers: Any = recipe.task
    steps = max(1, recipe.share(numbers['epsilon_until']))
    clip = np.clip if isinstance(number, int) else jnp.clip  # on the host without the device
    progress = clip(number / steps, 0, 1)
    return 1 + progress * (numbers['epsilon_end'] - 1)


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

    def move(now):
        number, games, observations, sums, is_playing = now
        key_action, key_game = jax.random.split(jax.random.fold_in(key_play, number))
        actions = explore(key_action, values(observations), epsilon)
        observations, games, new, ended = game.play(key_game, games, observations, actions)
        sums += new.reward * is_playing
        return number + 1, games, observations, sums, is_playing & ~ended

    start = 0, games, observations, jnp.zeros(count), jnp.ones(count, bool)
    _, _, _, sums, _ = jax.lax.while_loop(lambda now: now[-1].any(), move, start)
    return sums


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
        replay = empty(capacity, self.game.shape)
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
        batch = sample(key_sample, agent.replay, inserted, size)
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
        replay = insert(agent.replay, new, before)
        return Agent(agent.target, games, after, replay)
