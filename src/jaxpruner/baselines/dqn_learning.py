"""What DQN learns, wherever its games are played: targets, loss, an update of both networks."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines.device_replay import Transitions
from jaxpruner.baselines.dqn_model import Convolution, QNetwork
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry


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
    network: Functional = dataclasses.field(init=False)

    def __post_init__(self):
        sizes: Any = self.recipe.model
        dtype = jnp.dtype(self.recipe.dtype)
        settings = sizes['filters'], sizes['kernel_sizes'], sizes['strides']
        convolutions = [Convolution(*setting) for setting in zip(*settings, strict=True)]

        def make(rngs):
            hidden = sizes['hidden']
            actions = self.actions
            return QNetwork(self.shape, convolutions, hidden, actions, dtype, rngs=rngs)

        object.__setattr__(self, 'network', Functional(make))

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
