"""The workload `dqn`: a deep Q-network that plays MinAtar's Breakout, environment and replay inside the program.

DQN is that of Mnih et al. 2015 (https://doi.org/10.1038/nature14236) with Adam and the Huber loss, the game and the
network are those of MinAtar (Young and Tian 2019, https://arxiv.org/abs/1903.03176) as gymnax has them (Lange 2022).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpruner.baselines import replay as replays
from jaxpruner.baselines.dqn_model import QNetwork
from jaxpruner.baselines.games import Games
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.recipe import Optimizer, Recipe, Schedule
from jaxpruner.baselines.replay import Transitions
from jaxpruner.baselines.task import Carry, Metric, Task, step_key


class Agent(NamedTuple):
    """What DQN carries besides the trained parameters.

    >>> Agent(target={}, games=None, observations=jnp.zeros((8, 10, 10, 4)), replay=None).observations.shape
    (8, 10, 10, 4)
    """

    target: Any  # parameters of the target network
    games: Any  # the environments' states, a leading axis of `environments`
    observations: jax.Array  # float32[environments, height, width, channels]
    replay: Any  # Transitions


class DQNWorkload:
    """Deep Q-learning; the metric is the mean return of whole games, played (all but) greedily.

    A step plays one move in each environment and makes one update.

    >>> DQNWorkload().default('default').data
    'Breakout-MinAtar'
    """

    name = 'dqn'
    presets = ('default',)

    def default(self, preset: str) -> Recipe:
        """The recipe of a preset; there is one."""
        if preset not in self.presets:
            raise ValueError(f'dqn has no preset {preset!r}; it has {", ".join(self.presets)}')
        return Recipe(
            'dqn', preset, data='Breakout-MinAtar', steps=20_000, batch_size=64, eval_every=0.2,
            optimizer=Optimizer(name='adam', learning_rate=1e-3), schedule=Schedule(decay='cosine'),
            model={'filters': (16,), 'kernel_sizes': (3,), 'strides': (1,), 'hidden': 128},
            task={
                'environments': 16, 'replay': 48_000, 'replay_start': 4_800, 'discount': 0.99,
                'target_every': 200, 'epsilon_end': 0.05, 'epsilon_until': 0.3,
                'test_games': 64, 'test_epsilon': 0.01,
            },
        )  # fmt: skip

    def data(self, recipe: Recipe, data_dir: Path | None) -> None:
        """There is none: the game makes it.

        Args:
          recipe: its field `data` names the game.
          data_dir: unused.

        Raises:
          ValueError: gymnax has no such game.
        """
        del data_dir
        Games(recipe.data)

    def task(self, recipe: Recipe, data: None = None) -> Task:
        """The training.

        Args:
          recipe: `model` are sizes; `task` are the numbers of DQN: `epsilon_until` is a share of the steps, `replay`
            and `replay_start` (moves of random play before the first update) are transitions.
          data: nothing.

        Raises:
          ValueError: the buffer is no multiple of the environments.
        """
        numbers: Any = recipe.task
        sizes: Any = recipe.model
        count = numbers['environments']
        if numbers['replay'] % count or numbers['replay_start'] % count or numbers['replay_start'] < 1:
            raise ValueError(
                f'task.replay {numbers["replay"]} and task.replay_start {numbers["replay_start"]} must be multiples of '
                f'task.environments {count}'
            )
        game, dtype = Games(recipe.data), jnp.dtype(recipe.dtype)
        convolutions = list(zip(sizes['filters'], sizes['kernel_sizes'], sizes['strides'], strict=True))
        network = Functional(
            lambda rngs: QNetwork(game.shape, convolutions, sizes['hidden'], game.actions, dtype, rngs=rngs)
        )
        learning = _Learning(recipe, game, network)
        return Task(
            metric=Metric('return', 'high'),
            steps=recipe.steps,
            init=lambda key: network.init(key)[0],
            init_state=learning.init_state,
            batch=lambda key, number: None,
            loss=learning.loss,
            evaluate=learning.evaluate,
            step=learning.step,
        )


def td_targets(transitions: Transitions, next_values: jax.Array, discount: float) -> jax.Array:
    """What the value of each action should have been: `reward + discount * max(next values)`.

    Args:
      transitions: n of them.
      next_values: of each action after them, float32[n, actions].
      discount: for each step.

    Returns:
      float32[n]; the reward alone where the game ended.

    >>> done = Transitions(*[jnp.zeros(2)] * 2, jnp.array([1.0, 1.0]), jnp.zeros(2), jnp.array([False, True]))
    >>> td_targets(done, jnp.array([[2.0, 4.0], [2.0, 4.0]]), 0.5).tolist()
    [3.0, 1.0]
    """
    future = jnp.where(transitions.terminal, 0.0, next_values.max(axis=-1))
    return transitions.reward + discount * future


def explore(key: jax.Array, values: jax.Array, epsilon: jax.Array | float) -> jax.Array:
    """Picks the best action, or with a probability of epsilon any.

    Args:
      key: a typed key.
      values: of each action, float32[n, actions].
      epsilon: the probability.

    Returns:
      int32[n].

    >>> explore(jax.random.key(0), jnp.array([[0.0, 1.0], [1.0, 0.0]]), 0.0).tolist()
    [1, 0]
    """
    key_choice, key_action = jax.random.split(key)
    random = jax.random.randint(key_action, values.shape[:1], 0, values.shape[-1])
    at_random = jax.random.uniform(key_choice, values.shape[:1]) < epsilon
    return jnp.where(at_random, random, values.argmax(axis=-1)).astype(jnp.int32)


def returns(
    key: jax.Array, game: Games, values: Callable[[jax.Array], jax.Array], count: int, epsilon: float
) -> jax.Array:
    """Plays whole games.

    Args:
      key: a typed key.
      game: which.
      values: from observations to the value of each action.
      count: how many games, at the same time.
      epsilon: how often any action is taken instead of the best.

    Returns:
      The sum of the rewards of each, float32[count].

    >>> no_move = lambda observations: jnp.zeros((len(observations), 3))
    >>> jax.jit(lambda key: returns(key, Games('Breakout-MinAtar'), no_move, 2, 0.0))(jax.random.key(0)).shape
    (2,)
    """
    key_reset, key_play = jax.random.split(key)
    observations, games = game.reset(key_reset, count)

    def move(now: tuple[Any, ...]) -> tuple[Any, ...]:
        number, games, observations, sums, playing = now
        key_action, key_game = jax.random.split(jax.random.fold_in(key_play, number))
        actions = explore(key_action, values(observations), epsilon)
        after, games, new, done = game.play(key_game, games, observations, actions)
        return number + 1, games, after, sums + new.reward * playing, playing & ~done

    start = 0, games, observations, jnp.zeros(count), jnp.ones(count, bool)
    return jax.lax.while_loop(lambda now: now[-1].any(), move, start)[3]


@dataclasses.dataclass(frozen=True)
class _Learning:
    """The functions of a task."""

    recipe: Recipe
    game: Games
    network: Functional

    @property
    def numbers(self) -> Any:
        return self.recipe.task

    def init_state(self, params: Any, key: jax.Array) -> Agent:
        """Fills the buffer by random play."""
        count = self.numbers['environments']
        key_reset, key_play = jax.random.split(key)
        observations, games = self.game.reset(key_reset, count)

        def move(number: jax.Array, agent: Agent) -> Agent:
            key_action, key_game = jax.random.split(jax.random.fold_in(key_play, number))
            actions = explore(key_action, jnp.zeros((count, self.game.actions)), 1.0)
            return self._play(key_game, agent, actions, number * count)

        agent = Agent(params, games, observations, replays.empty(self.numbers['replay'], self.game.shape))
        return jax.lax.fori_loop(0, self.numbers['replay_start'] // count, move, agent)

    def loss(self, params: Any, state: Agent, batch: Transitions, key: Any = None) -> tuple[jax.Array, Agent]:
        del key
        next_values = self.network.module(state.target)(batch.next_observation)
        targets = td_targets(batch, next_values, self.numbers['discount'])
        values = self.network.module(params)(batch.observation)
        predicted = jnp.take_along_axis(values, batch.action[:, None], axis=-1)[:, 0]
        return optax.huber_loss(predicted, targets).mean(), state

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A move in each environment, and an update."""
        key_action, key_game, key_sample = jax.random.split(step_key(carry.key, number), 3)
        params, agent, opt_state, _ = carry
        seen = self.network.module(updater.pre_forward_update(params, opt_state))(agent.observations)
        actions = explore(key_action, seen, _epsilon(self.recipe, number))
        before = self.numbers['replay_start'] + number * len(actions)
        agent = self._play(key_game, agent, actions, before)
        batch = replays.sample(key_sample, agent.replay, before + len(actions), self.recipe.batch_size)

        def of_params(params: Any) -> jax.Array:
            return self.loss(updater.pre_forward_update(params, opt_state), agent, batch)[0]

        updates, opt_state = tx.update(jax.grad(of_params)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
        newest = updater.pre_forward_update(params, opt_state)
        due = number % self.numbers['target_every'] == 0
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), newest, agent.target)
        return carry._replace(params=params, opt_state=opt_state, state=agent._replace(target=target))

    def evaluate(self, params: Any, state: Any) -> dict[str, jax.Array]:
        del state
        count, epsilon = self.numbers['test_games'], self.numbers['test_epsilon']
        return {'return': returns(jax.random.key(0), self.game, self.network.module(params), count, epsilon).mean()}

    def _play(self, key: jax.Array, agent: Agent, actions: jax.Array, before: Any) -> Agent:
        """The agent after a move in each environment; so many transitions were in the buffer before."""
        after, games, new, _ = self.game.play(key, agent.games, agent.observations, actions)
        return Agent(agent.target, games, after, replays.insert(agent.replay, new, before))


def _epsilon(recipe: Recipe, number: jax.Array) -> jax.Array:
    """The probability of a random action: from 1 linearly to its end."""
    numbers: Any = recipe.task
    done = jnp.clip(number / max(1, recipe.share(numbers['epsilon_until'])), 0, 1)
    return 1 + done * (numbers['epsilon_end'] - 1)
