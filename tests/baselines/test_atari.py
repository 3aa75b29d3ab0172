import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ale_py = pytest.importorskip('ale_py', reason='the games are those of ale-py')

from jaxpruner.baselines import atari  # noqa: E402
from jaxpruner.baselines.atari import (  # noqa: E402
    Conventions,
    Emulators,
    FrameReplay,
    Outcome,
    check_game,
    choose,
    play_games,
    resize,
)
from jaxpruner.baselines.dqn import DQNWorkload  # noqa: E402
from jaxpruner.baselines.minatar import Transitions  # noqa: E402
from jaxpruner.baselines.programs import FeedTraining  # noqa: E402
from jaxpruner.baselines.training import Training  # noqa: E402

WORKLOAD = DQNWorkload()
PLAIN = Conventions(sticky=0.0, no_ops=0)
TINY = WORKLOAD.default('atari').updated(
    {
        'batch_size': 3,
        'model': {'filters': [2], 'kernel_sizes': [8], 'strides': [8], 'hidden': 4},
        'task': {
            'environments': 2,
            'moves': 4,
            'replay': 40,
            'replay_start': 16,
            'test_games': 2,
            'test_longest': 4,
        },
    }
)


def rng():
    return np.random.default_rng(0)


class NumberedGames:
    """Two games of 5 and 7 moves, the second cut off at its end; each frame shows its number."""

    lengths, is_cut = (5, 7), (False, True)

    def __init__(self):
        self.frames, self.ages = np.array([1, 101]), np.zeros(2, int)
        self.observations = np.zeros((2, *atari.SHAPE), np.uint8)
        self.observations[..., -1] = self.frames[:, None, None]

    @property
    def behind(self):
        return np.minimum(self.ages, 3)

    def step(self, actions):
        self.frames, self.ages = self.frames + 1, self.ages + 1
        ended = self.ages >= self.lengths
        self.ages[ended] = 0
        self.observations = np.roll(self.observations, -1, axis=-1)
        self.observations[..., -1] = self.frames[:, None, None]
        return Outcome(
            10.0 * np.asarray(actions) - 5.0, ended & ~np.array(self.is_cut), ended & self.is_cut
        )


def test_frames_are_those_of_the_emulator():
    """Played by hand without chance: the maximum of the last two of four frames, the newest last, zeros before."""
    emulators = Emulators('MsPacman', 1, rng(), PLAIN)
    game = ale_py.ALEInterface()
    game.setFloat('repeat_action_probability', 0.0)
    game.loadROM(ale_py.roms.get_rom_path('ms_pacman'))
    seen = [resize(game.getScreenGrayscale()[None])[0]]
    actions = game.getMinimalActionSet()
    assert not emulators.observations[..., :3].any()
    for number in range(8):
        screens = []
        for _ in range(4):
            game.act(actions[number])
            screens.append(game.getScreenGrayscale())
        seen.append(resize(np.maximum(*screens[2:])[None])[0])
        emulators.step(np.array([number]))
    assert emulators.actions == 9
    assert emulators.behind.tolist() == [3]
    np.testing.assert_array_equal(emulators.observations[0], np.stack(seen[-4:], axis=-1))
    assert (seen[-1] != seen[-2]).any()


def test_resizing_takes_the_mean_over_areas():
    screens = rng().integers(256, size=(2, 168, 252)).astype(np.uint8)
    by_hand = screens.reshape(2, 84, 2, 84, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(resize(screens), by_hand, atol=0.51)
    screens = rng().integers(256, size=(1, 210, 160)).astype(np.uint8)
    np.testing.assert_allclose(resize(screens).mean(), screens.mean(), atol=0.1)


def test_games_end_at_their_limit_and_begin_anew():
    emulators = Emulators('MsPacman', 2, rng(), Conventions(longest=3))
    outcomes = [emulators.step(np.zeros(2, int)) for _ in range(4)]
    assert [outcome.cut.tolist() for outcome in outcomes] == [
        [False] * 2,
        [False] * 2,
        [True] * 2,
        [False] * 2,
    ]
    assert not any(outcome.ended.any() for outcome in outcomes)
    assert emulators.behind.tolist() == [1, 1]
    assert not emulators.observations[..., :2].any()


def test_emulators_differ_and_go_on_where_others_were():
    """Enough moves with sticky actions for two games to part."""
    emulators, moves = Emulators('MsPacman', 2, rng()), rng().integers(9, size=(200, 2))
    moves[:, 1] = moves[:, 0]
    for move in moves[:150]:
        emulators.step(move)
    other = Emulators('MsPacman', 2, np.random.default_rng(1))
    other.set_state({name: array.copy() for name, array in emulators.state().items()})
    rewards = []
    for move in moves[150:]:
        outcome, expected = other.step(move), emulators.step(move)
        np.testing.assert_array_equal(outcome.reward, expected.reward)
        rewards.append(outcome.reward)
    np.testing.assert_array_equal(other.observations, emulators.observations)
    assert np.any(rewards)
    assert (emulators.observations[0] != emulators.observations[1]).any()


def test_the_buffer_puts_observations_together():
    replay, games = FrameReplay(capacity=24, count=2), NumberedGames()
    for number in range(30):
        replay.play(games, np.array([number % 2, 1]))
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
        np.testing.assert_array_equal(
            shown, np.where(back <= age[:, None], newest[:, None] - back, 0)
        )
        over = (game == 0) & (age == 4)
        assert not ((game == 1) & (age == 6)).any()  # what was cut off is not drawn
        np.testing.assert_array_equal(batch.terminal, over)
        np.testing.assert_array_equal(after[~over, -1], newest[~over] + 1)
        np.testing.assert_array_equal(
            after[~over, :-1], np.where(shown[~over, 1:], shown[~over, 1:], 0)
        )
        np.testing.assert_array_equal(batch.action, np.where(game == 1, 1, at % 2))
        np.testing.assert_array_equal(batch.reward, 2 * batch.action - 1)  # of 5 and -5
    assert (batch.observation.dtype, batch.observation.shape) == (np.uint8, (200, 84, 84, 4))
    assert len(replay) == 60
    assert {frame for frame in newest if frame < 101} <= set(
        range(22, 30)
    )  # 12 rows, of which 3 lost their history


def test_choosing():
    games = types.SimpleNamespace(observations=np.zeros((3000, 1)), actions=3)
    values = np.tile([0.0, 5.0, 1.0], (3000, 1))
    assert (choose(games, lambda seen: values, 0.0, rng()) == 1).all()
    shares = np.bincount(choose(games, lambda seen: values, 0.3, rng()), minlength=3) / 3000
    np.testing.assert_allclose(shares, [0.1, 0.8, 0.1], atol=0.03)
    assert set(choose(games, lambda seen: pytest.fail('not needed'), 1.0, rng())) == {0, 1, 2}


def test_returns_are_unclipped_sums_of_the_first_game():
    games = NumberedGames()
    values = lambda observations: np.eye(2)[[0, 1]]  # noqa: E731
    games.actions = 2
    assert play_games(games, values, 0.0, rng()).tolist() == [-5.0 * 5, 5.0 * 7]


def linear(observations):
    return observations.reshape(len(observations), -1) @ np.random.default_rng(5).normal(
        size=(84 * 84 * 4, 9)
    )


def assert_equal(one, other):
    for array, expected in zip(one, other, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_feed_goes_on_where_it_was_saved(tmp_path):
    feed = atari.AtariFeed(TINY.updated({'steps': 8}), seed=3)
    first = [feed.next(linear) for _ in range(4)]
    feed.save(tmp_path)
    expected = [feed.next(linear) for _ in range(6)]  # past the buffer's end
    resumed = atari.AtariFeed(TINY.updated({'steps': 8}), seed=3)
    resumed.restore(tmp_path)
    for batch, same in zip(expected, [resumed.next(linear) for _ in range(6)], strict=True):
        assert_equal(batch, same)
    assert_equal(first[0], atari.AtariFeed(TINY, seed=3).next(linear))
    assert (first[0].observation != atari.AtariFeed(TINY, seed=4).next(linear).observation).any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['frames.npy', 'player.npz']


@pytest.mark.parametrize('name', ['frames.npy', 'player.npz'])
@pytest.mark.parametrize('damage', ['missing', 'cut'])
def test_a_damaged_folder_is_refused(tmp_path, name, damage):
    feed = atari.AtariFeed(TINY, seed=0)
    feed.next(linear)
    feed.save(tmp_path)
    if damage == 'missing':
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    with pytest.raises(ValueError, match=f'{name} is not what a feed of this recipe saved'):
        atari.AtariFeed(TINY, seed=0).restore(tmp_path)


def test_a_feed_of_other_numbers_is_refused(tmp_path):
    feed = atari.AtariFeed(TINY, seed=0)
    feed.next(linear)
    feed.save(tmp_path)
    other = atari.AtariFeed(TINY.updated({'task': {'environments': 4}}), seed=0)
    with pytest.raises(ValueError, match='frames has the shape'):
        other.restore(tmp_path)


def test_random_play_is_evaluated_as_the_network_is():
    recipe = TINY.updated({'task': {'test_longest': 120, 'test_games': 3}})
    found = atari.random_returns(recipe)
    assert found.shape == (3,)
    assert (found > 0).all()
    np.testing.assert_array_equal(found, atari.returns(recipe, linear, 0, 1.0))


def test_names_of_games():
    assert check_game('MsPacman') == 'ms_pacman'
    with pytest.raises(ValueError, match=r"no game 'MsPackman'; did you mean 'MsPacman'"):
        WORKLOAD.data(TINY.updated({'data': 'MsPackman'}), None)


@pytest.mark.parametrize(
    ('numbers', 'words'),
    [
        ({'moves': 3}, 'task.moves 3 must be a multiple of task.environments 2'),
        ({'replay_start': 0}, 'task.replay_start 0 must be a multiple of task.environments 2'),
        ({'environments': 0}, 'task.environments must be at least 1, got 0'),
        ({'longest': 1}, 'task.longest must be at least 2, got 1'),
        ({'sticky': 1.5}, 'task.sticky is a probability, got 1.5'),
        ({'replay': 14}, 'task.replay 14 must hold 8 moves of each of 2 environments'),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, words):
    with pytest.raises(ValueError, match=words):
        WORKLOAD.task(TINY.updated({'task': numbers}))


def test_training_prunes_and_resumes_bit_for_bit(tmp_path):
    recipe = TINY.updated(
        {'steps': 8, 'pruning': {'start': 0.0, 'frequency': 0.25}, 'task': {'target_every': 3}}
    )
    training = FeedTraining(WORKLOAD, recipe, None, 'magnitude')
    targets = training.targets([0.5])
    feed = training.open([0])
    carries = training.advance(targets, training.start(targets, [0]), 0, 5)
    feed.save(tmp_path)
    saved = jax.tree.map(jnp.copy, carries)
    carries = training.advance(targets, carries, 5, 8)
    metrics, masks = training.report(targets, carries)
    training.open([0]).restore(tmp_path)
    again = training.advance(targets, saved, 5, 8)
    training.close()
    for leaf, same in zip(jax.tree.leaves(again), jax.tree.leaves(carries), strict=True):
        np.testing.assert_array_equal(plain(leaf), plain(same))
    assert metrics == training.report(targets, again)[0]
    assert set(metrics) == {'return'}
    assert {path: (mask == 0).mean() for path, mask in masks.items()} == dict.fromkeys(
        training.prunable(), 0.5
    )
    followed = jax.tree.leaves(carries.state.target)  # of step 6; the last is 7
    assert any(
        (leaf != new).any()
        for leaf, new in zip(followed, jax.tree.leaves(carries.params), strict=True)
    )
    assert any(
        (leaf != old).any()
        for leaf, old in zip(followed, jax.tree.leaves(saved.state.target), strict=True)
    )


def plain(leaf):
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


@pytest.mark.parametrize('algorithm', ['magnitude_ste', 'rigl'])
def test_the_full_preset_fits_every_kind_of_algorithm(algorithm):
    """Traced, not run."""
    training = Training(WORKLOAD, WORKLOAD.default('full'), algorithm)
    targets = training.targets(None, 0.8)
    frames = jax.ShapeDtypeStruct((32, *atari.SHAPE), jnp.uint8)
    batch = Transitions(frames, vector(jnp.int32), vector(jnp.float32), frames, vector(bool))

    def train(batch):
        carry = training.start(targets, 0, *training.init(None, 0))
        return carry, training.step(None, targets, carry, 5, batch)

    carry, after = jax.eval_shape(train, batch)
    assert jax.tree.structure(carry) == jax.tree.structure(after)
    assert kinds(carry) == kinds(after)
    assert sum(training.prunable(None).values()) == 1_688_064


def vector(dtype):
    return jax.ShapeDtypeStruct((32,), dtype)


def kinds(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
