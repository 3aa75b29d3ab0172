"""The replay buffer of DQN as arrays of a fixed size, so that it lives inside a compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Transitions(NamedTuple):
    """What happened in several steps of an environment; the first axis counts them."""

    observation: jax.Array  # bool[n, height, width, channels], or uint8
    action: jax.Array  # int32[n]
    reward: jax.Array  # float32[n]
    next_observation: (
        jax.Array
    )  # like observation; of the episode's end, not of the next one's start
    terminal: jax.Array  # bool[n]; not where an episode was cut off for its length


def empty(capacity: int, shape: tuple[int, ...]) -> Transitions:
    """A buffer with nothing in it."""
    observations = jnp.zeros((capacity, *shape), bool)
    return Transitions(
        observation=observations,
        action=jnp.zeros(capacity, jnp.int32),
        reward=jnp.zeros(capacity, jnp.float32),
        next_observation=observations,
        terminal=jnp.zeros(capacity, bool),
    )


def insert(replay: Transitions, new: Transitions, before: jax.Array | int) -> Transitions:
    """Puts transitions in place of the oldest.

    >>> insert(Transitions(*[jnp.zeros(4)] * 5), Transitions(*[jnp.ones(2)] * 5), 6).reward.tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    place = before % len(replay.reward)

    def write(old: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, values.astype(old.dtype), place, axis=0)

    return jax.tree.map(write, replay, new)


def sample(
    key: jax.Array, replay: Transitions, inserted: jax.Array | int, size: int
) -> Transitions:
    """Draws transitions, each as likely, with repetition."""
    places = jax.random.randint(key, (size,), 0, jnp.minimum(inserted, len(replay.reward)))
    return jax.tree.map(lambda values: values[places], replay)
