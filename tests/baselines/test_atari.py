"""Atari games: frames, the buffer, and a training that goes on where it was."""

import jax
import numpy as np
import pytest

pytest.importorskip('ale_py', reason='the games are those of ale-py')

from jaxpruner.baselines import atari
from jaxpruner.baselines.atari import AtariFeed, FrameReplay
from jaxpruner.baselines.dqn import DQNWorkload
from jaxpruner.baselines.programs import Programs, masks_by_path

WORKLOAD = DQNWorkload()
TINY = WORKLOAD.default('atari').updated(
    {
        'steps': 8,
        'batch_size': 3,
        'model': {'filters': [2], 'kernel_sizes': [8], 'strides': [8], 'hidden': 4},
        'pruning': {'start': 0.0, 'frequency': 0.25},
        'task': {
            'environments': 2,
            'moves': 4,
            'replay': 40,
            'replay_start': 16,
            'test_games': 2,
            'test_longest': 4,
            'target_every': 3,
        },
    }
)


def rng():
    return np.random.default_rng(0)


def test_games_end_at_their_limit_and_begin_anew():
    games = atari.make_games(TINY, 2, longest=3)
    frames, _ = games.reset(seed=0)
    assert not frames[:, :3].any()
    endings = []
    for _ in range(4):
        frames, _, ended, cut, _ = games.step(np.zeros(2, int))
        assert not ended.any()
        endings.append(cut.tolist())
    assert endings == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert not frames[:, :2].any()
    assert frames[:, 2:].any(axis=(2, 3)).all()


def test_the_buffer_puts_observations_together():
    """Two games of 5 and 7 moves, the second cut off at its end; each frame shows its number."""
    replay, frames, ages = FrameReplay(capacity=24, count=2), np.array([1, 101]), np.zeros(2, int)
    for number in range(30):
        actions, over = np.array([number % 2, 1]), ages + 1 >= (5, 7)
        replay.add(
            frames=frames[:, None, None],
            action=actions,
            reward=2.0 * actions - 1,
            ending=over * np.array([1, 2]),
        )
        frames, ages = frames + 1, np.where(over, 0, ages + 1)
        if number < 2:
            continue
        batch = replay.sample(rng(), 200)
        shown = batch.observation[:, 0, 0].astype(int)
        after = batch.next_observation[:, 0, 0].astype(int)
        newest = shown[:, -1]
        game = newest // 101
        at = newest - np.array([1, 101])[game]
        age = at % np.array([5, 7])[game]
        back = np.arange(4)[::-1]
        expected = np.where(back <= age[:, None], newest[:, None] - back, 0)
        np.testing.assert_array_equal(shown, expected)
        ended = (game == 0) & (age == 4)
        assert not ((game == 1) & (age == 6)).any()  # what was cut off is not drawn
        np.testing.assert_array_equal(batch.terminal, ended)
        np.testing.assert_array_equal(after[~ended, -1], newest[~ended] + 1)
        np.testing.assert_array_equal(batch.action, np.where(game == 1, 1, at % 2))
        np.testing.assert_array_equal(batch.reward, 2 * batch.action - 1)
    assert (batch.observation.dtype, batch.observation.shape) == (np.uint8, (200, 84, 84, 4))
    assert len(replay) == 60
    # 12 rows, of which 3 lost their history
    assert {frame for frame in newest if frame < 101} <= set(range(22, 30))


def linear(observations):
    weights = np.random.default_rng(5).normal(size=(84 * 84 * 4, 9))
    return observations.reshape(len(observations), -1) @ weights


def test_a_feed_goes_on_with_games_and_a_buffer_that_begin_anew():
    feed, again = AtariFeed(TINY, seed=3), AtariFeed(TINY, seed=3)
    first = feed.next(linear)
    np.testing.assert_array_equal(first.observation, again.next(linear).observation)
    other = AtariFeed(TINY, seed=4).next(linear)
    assert (first.observation != other.observation).any()
    for _ in range(9):
        feed.next(linear)  # past the buffer's end
    resumed = [AtariFeed(TINY, seed=3) for _ in range(2)]
    for one in resumed:
        one.set_state(feed.state())
    batches = [one.next(linear).observation for one in resumed]
    np.testing.assert_array_equal(*batches)
    assert (batches[0] != first.observation).any()


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'data': 'MsPackman'}, r"no game 'MsPackman'; did you mean 'MsPacman'"),
        ({'task': {'moves': 3}}, 'task.moves 3 must be a multiple of task.environments 2'),
        ({'task': {'replay': 14}}, 'task.replay 14 must hold 8 moves of each of 2 environments'),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    recipe = TINY.updated(changes)
    with pytest.raises(ValueError, match=words):
        WORKLOAD.task(recipe, WORKLOAD.data(recipe, None))


def test_training_prunes_and_the_target_network_follows():
    programs = Programs(WORKLOAD, TINY, None)
    targets, feed = programs.targets('rigl', [0.5]), programs.task.feed(0)
    first = programs.start('rigl', targets, [0])
    before = jax.tree.map(np.array, first.params)
    carries = programs.advance('rigl', targets, first, 0, 8, feed)
    metrics = programs.report('rigl', targets, carries, [0])
    assert set(metrics) == {'return'}
    for mask in masks_by_path(carries.opt_state).values():
        assert (mask == 0).mean() == 0.5
    followed = jax.tree.leaves(carries.state.target)  # of step 6; the last is 7
    for others in (carries.params, before):
        pairs = zip(followed, jax.tree.leaves(others), strict=True)
        assert any((leaf != other).any() for leaf, other in pairs)
