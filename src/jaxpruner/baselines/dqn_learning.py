"""What DQN learns, wherever its games are played: targets, loss, an update of the network and of its target."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines.device_replay import Transitions
from jaxpruner.baselines.dqn_model import QNetwork
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry


class TargetNetwork(NamedTuple):
    """What DQN carries besides the trained parameters where its games are played on the host."""

    target: Any  # parameters of the target network


@dataclasses.dataclass(frozen=True)
class DeepQLearning:
    """The functions of a task that learns by DQN; the state that is carried has a field `target`."""

    recipe: Recipe  # model: sizes; task: discount and target_every
    shape: tuple[int, ...]  # of an observation
    actions: int
    network: Functional = dataclasses.field(init=False)

    def __post_init__(self):
        sizes: Any = self.recipe.model
        convolutions = list(
            zip(sizes['filters'], sizes['kernel_sizes'], sizes['strides'], strict=True)
        )
        dtype = jnp.dtype(self.recipe.dtype)

        def make(rngs: Any) -> QNetwork:
            return QNetwork(
                self.shape, convolutions, sizes['hidden'], self.actions, dtype, rngs=rngs
            )

        object.__setattr__(self, 'network', Functional(make))

    def init(self, key: jax.Array) -> Any:
        """The parameters of the network."""
        return self.network.init(key)[0]

    def values(self, params: Any, observations: jax.Array) -> jax.Array:
        """The value of each action."""
        return self.network.module(params)(observations)

    def loss(
        self, params: Any, state: Any, batch: Transitions, key: Any = None
    ) -> tuple[jax.Array, Any]:
        """The mean Huber loss of the values of the actions that were taken, and the state as it was."""
        del key
        numbers: Any = self.recipe.task
        next_values = self.values(state.target, batch.next_observation)
        targets = td_targets(batch, next_values, numbers['discount'])
        values = self.values(params, batch.observation)
        predicted = jnp.take_along_axis(values, batch.action[:, None], axis=-1)[:, 0]
        return optax.huber_loss(predicted, targets).mean(), state

    def update(
        self, updater: Any, tx: Any, carry: Carry, number: jax.Array, batch: Transitions
    ) -> Carry:
        """An update of the optimizer and, when it is due, of the target network."""
        params, state, opt_state, _ = carry
        numbers: Any = self.recipe.task

        def of_params(params: Any) -> jax.Array:
            return self.loss(updater.pre_forward_update(params, opt_state), state, batch)[0]

        updates, opt_state = tx.update(jax.grad(of_params)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
        newest = updater.pre_forward_update(params, opt_state)
        due = number % numbers['target_every'] == 0
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), newest, state.target)
        return carry._replace(
            params=params, opt_state=opt_state, state=state._replace(target=target)
        )


def td_targets(transitions: Transitions, next_values: jax.Array, discount: float) -> jax.Array:
    """What the value of each action should have been: `reward + discount * max(next values)`.

    >>> done = Transitions(*[jnp.zeros(2)] * 2, jnp.array([1.0, 1.0]), jnp.zeros(2), jnp.array([False, True]))
    >>> td_targets(done, jnp.array([[2.0, 4.0], [2.0, 4.0]]), 0.5).tolist()
    [3.0, 1.0]
    """
    future = jnp.where(transitions.terminal, 0.0, next_values.max(axis=-1))
    return transitions.reward + discount * future


def exploration(recipe: Recipe, number: jax.Array | int) -> Any:
    """The probability of a random action: from 1 linearly to its end."""
    numbers: Any = recipe.task
    clip = np.clip if isinstance(number, int) else jnp.clip  # on the host without the device
    done = clip(number / max(1, recipe.share(numbers['epsilon_until'])), 0, 1)
    return 1 + done * (numbers['epsilon_end'] - 1)
