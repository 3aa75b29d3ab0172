"""The replay buffer of games on the device: arrays of a fixed size, inside the compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
