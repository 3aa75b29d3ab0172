import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.baselines.atari import Transitions
from jaxpruner.baselines.dqn import DQNWorkload
from jaxpruner.baselines.training import Training

pytest.importorskip('gymnax', reason='the games are those of gymnax')
WORKLOAD = DQNWorkload()
TINY = {
    'steps': 8,
    'batch_size': 4,
    'model': {'filters': [2], 'hidden': 4},
    'pruning': {'start': 0.0, 'frequency': 0.25},
    'task': {
        'environments': 2,
        'replay': 12,
        'replay_start': 6,
        'target_every': 3,
        'test_games': 3,
    },
}


def transitions(rewards, terminal=False):
    count = len(rewards)
    observations = jnp.zeros((count, 10, 10, 4), bool)
    return Transitions(
        observations,
        jnp.arange(count) % 3,
        jnp.array(rewards, jnp.float32),
        observations,
        jnp.full(count, terminal),
    )


@pytest.fixture(scope='module')
def played():
    """The first carry, and those after 3 and after 8 steps of a tiny run with a pruner, all under jit."""
    recipe = WORKLOAD.default('default').updated(TINY)
    task = WORKLOAD.task(recipe)
    training = Training(task, recipe, 'magnitude')
    targets = training.targets(0.5)
    first = jax.jit(lambda: training.start(training.init(0), targets, 0))()
    advance = jax.jit(lambda carry, *steps: training.advance(carry, targets, *steps))
    third = advance(first, 0, 3)
    return task, first, third, advance(third, 3, 8)


def test_the_loss_is_that_of_the_action_taken(played):
    """With all parameters zero every value is zero: the error is the reward, of which Huber takes |e| - 1/2 above 1."""
    task, first, *_ = played
    zeros = jax.tree.map(jnp.zeros_like, first.params)
    state = first.state._replace(target=zeros)
    loss, _ = task.loss(zeros, state, transitions([3.0, 0.5, 0.0]), None)
    np.testing.assert_allclose(loss, (2.5 + 0.125 + 0.0) / 3, rtol=1e-6)
    grads = jax.grad(lambda p: task.loss(p, state, transitions([3.0, 0.5, 0.0]), None)[0])(zeros)
    np.testing.assert_allclose(
        grads['head']['bias'][...], np.array([-1.0, -0.5, 0.0]) / 3, rtol=1e-6
    )


def test_games_are_played_and_kept(played):
    _, first, third, last = played
    replay = last.state.replay
    assert (
        first.state.replay.observation[:6].any(axis=(1, 2, 3)).all()
    )  # random play before the first update
    assert not first.state.replay.observation[6:].any()
    assert replay.observation.any(axis=(1, 2, 3)).all()  # 6 + 8 * 2 moves went into 12 places
    assert third.state.replay.observation.shape == (12, 10, 10, 4)
    running = ~replay.terminal[2:8:2]
    after = replay.next_observation[2:8:2][running]
    np.testing.assert_array_equal(
        after, replay.observation[4:10:2][running]
    )  # a game goes on where it was


def test_the_target_network_follows_now_and_then(played):
    _, _, third, last = played

    def differ(one, other):
        return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), one, other)))

    assert differ(third.state.target, third.params)
    assert differ(third.state.target, last.state.target)
    assert jaxpruner.summarize_sparsity(last.params)['dense/kernel'] == 0.5
