"""The workload `dqn`: a deep Q-network that plays MinAtar's games inside the program, or Atari games on the host.

DQN is that of Mnih et al. 2015 (https://doi.org/10.1038/nature14236) with Adam and the Huber loss.
"""

from pathlib import Path
from typing import Any

import jax

from jaxpruner.baselines import atari_feed
from jaxpruner.baselines.atari import SHAPE, check_game, count_actions
from jaxpruner.baselines.data import check_no_folder
from jaxpruner.baselines.dqn_learning import DeepQLearning, TargetNetwork
from jaxpruner.baselines.dqn_model import NATURE
from jaxpruner.baselines.feeds import Values
from jaxpruner.baselines.minatar_games import Games
from jaxpruner.baselines.minatar_training import minatar_task
from jaxpruner.baselines.recipe import Optimizer, Recipe, Schedule
from jaxpruner.baselines.task import Metric, Task

_FILTERS, _KERNEL_SIZES, _STRIDES = zip(*NATURE, strict=True)
# How Atari games are played in all presets; atari.Conventions says what each means.
_CONVENTIONS = {'frame_skip': 4, 'sticky': 0.25, 'no_ops': 30, 'longest': 27_000}


class DQNWorkload:
    """Deep Q-learning; the metric is the mean return of whole games, played (all but) greedily.

    The preset `default` plays MinAtar's Breakout: a step is one move in each environment and one update. `atari` (which
    is small) and `full` (Dopamine's numbers) play MsPacman: a step is `task.moves` moves and one update.
    """

    name = 'dqn'
    presets = ('default', 'atari', 'full')

    def default(self, preset: str) -> Recipe:
        """The recipe of a preset."""
        if preset not in self.presets:
            raise ValueError(f'dqn has no preset {preset!r}; it has {", ".join(self.presets)}')
        return {'default': _default, 'atari': _atari, 'full': _full}[preset]()

    def data(self, recipe: Recipe, data_dir: Path | None) -> None:
        """There is none: the game makes it."""
        check_no_folder(recipe.data, data_dir)
        if _is_atari(recipe):
            check_game(recipe.data)
        else:
            Games(recipe.data)

    def task(self, recipe: Recipe, data: None = None) -> Task:
        """The training."""
        return _atari_task(recipe) if _is_atari(recipe) else minatar_task(recipe)


def _default() -> Recipe:
    return Recipe(
        'dqn', 'default', data='Breakout-MinAtar', steps=20_000, batch_size=64, eval_every=0.2,
        optimizer=Optimizer(name='adam', learning_rate=1e-3), schedule=Schedule(decay='cosine'),
        model={'filters': (16,), 'kernel_sizes': (3,), 'strides': (1,), 'hidden': 128},
        task={
            'environments': 16, 'replay': 48_000, 'replay_start': 4_800, 'discount': 0.99,
            'target_every': 200, 'epsilon_end': 0.05, 'epsilon_until': 0.3,
            'test_games': 64, 'test_epsilon': 0.01,
        },
    )  # fmt: skip


def _atari() -> Recipe:
    """Half an hour of processor time: 100,000 moves, of which the first 2,000 are random."""
    return Recipe(
        'dqn', 'atari', data='MsPacman', steps=24_500, batch_size=32, eval_every=0.2,
        optimizer=Optimizer(name='adam', learning_rate=2.5e-4, epsilon=1.5e-4), schedule=Schedule(decay='constant'),
        model={'filters': _FILTERS, 'kernel_sizes': _KERNEL_SIZES, 'strides': _STRIDES, 'hidden': 512},
        task={
            'environments': 4, 'moves': 4, 'replay': 50_000, 'replay_start': 2_000, 'discount': 0.99,
            'target_every': 500, 'epsilon_end': 0.05, 'epsilon_until': 0.25,
            'test_games': 20, 'test_longest': 1_500, 'test_epsilon': 0.05, **_CONVENTIONS,
        },
    )  # fmt: skip


def _full() -> Recipe:
    """Dopamine's JaxDQNAgent with the Huber loss: 50 million moves, 200 million frames; tested as Mnih et al. 2015."""
    return Recipe(
        'dqn', 'full', data='MsPacman', steps=12_500_000, batch_size=32, eval_every=0.005,
        optimizer=Optimizer(name='adam', learning_rate=6.25e-5, epsilon=1.5e-4), schedule=Schedule(decay='constant'),
        model={'filters': _FILTERS, 'kernel_sizes': _KERNEL_SIZES, 'strides': _STRIDES, 'hidden': 512},
        task={
            'environments': 1, 'moves': 4, 'replay': 1_000_000, 'replay_start': 20_000, 'discount': 0.99,
            'target_every': 2_000, 'epsilon_end': 0.01, 'epsilon_until': 0.005,
            'test_games': 30, 'test_longest': 27_000, 'test_epsilon': 0.05, **_CONVENTIONS,
        },
    )  # fmt: skip


def _is_atari(recipe: Recipe) -> bool:
    return 'frame_skip' in recipe.task


def _atari_task(recipe: Recipe) -> Task:
    """The training on an Atari game, which is played on the host."""
    atari_feed.check_numbers(recipe)
    learning = DeepQLearning(recipe, SHAPE, count_actions(recipe.data))
    numbers: Any = recipe.task

    def evaluate_host(values: Values, seed: int) -> dict[str, float]:
        return {
            'return': float(
                atari_feed.returns(recipe, values, seed, numbers['test_epsilon']).mean()
            )
        }

    def init_state(params: Any, key: jax.Array) -> TargetNetwork:
        del key
        return TargetNetwork(params)

    return Task(
        metric=Metric('return', 'high'),
        steps=recipe.steps,
        init=learning.init,
        init_state=init_state,
        batch=_unused,
        loss=learning.loss,
        evaluate=_unused,
        step=learning.update,
        feed=lambda seed: atari_feed.AtariFeed(recipe, seed),
        values=learning.values,
        evaluate_host=evaluate_host,
    )


def _unused(*arguments: Any) -> Any:
    raise AssertionError('Atari games are played on the host, by the feed')
