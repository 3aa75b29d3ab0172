"""The workload `dqn`: a deep Q-network plays MinAtar's games on the device, or Atari's on the host.

DQN is that of Mnih et al. 2015 (https://doi.org/10.1038/nature14236) with Adam and the Huber loss.
"""

from pathlib import Path
from typing import Any

from jaxpruner.baselines import atari
from jaxpruner.baselines.atari import SHAPE, check_game, count_actions
from jaxpruner.baselines.data import check_no_folder
from jaxpruner.baselines.minatar import DeepQLearning, Games, minatar_task, target_network
from jaxpruner.baselines.recipe import Optimizer, Recipe, Schedule
from jaxpruner.baselines.task import Metric, PresetRecipes, Task

_DEFAULT = Recipe(
    'dqn',
    data='Breakout-MinAtar',
    steps=20_000,
    batch_size=64,
    eval_every=0.2,
    optimizer=Optimizer(name='adam', learning_rate=1e-3),
    schedule=Schedule(decay='cosine'),
    model={'filters': (16,), 'kernel_sizes': (3,), 'strides': (1,), 'hidden': 128},
    task={
        'environments': 16,
        'replay': 48_000,
        'replay_start': 4_800,
        'discount': 0.99,
        'target_every': 200,
        'epsilon_end': 0.05,
        'epsilon_until': 0.3,
        'test_games': 64,
        'test_epsilon': 0.01,
    },
)
# Half an hour of processor time: 100,000 moves, of which the first 2,000 are random.
_ATARI = Recipe(
    'dqn',
    preset='atari',
    data='MsPacman',
    steps=24_500,
    batch_size=32,
    eval_every=0.2,
    optimizer=Optimizer(name='adam', learning_rate=2.5e-4, epsilon=1.5e-4),
    schedule=Schedule(decay='constant'),
    # Mnih et al. 2015, for images of 84 x 84 x 4.
    model={
        'filters': (32, 64, 64),
        'kernel_sizes': (8, 4, 3),
        'strides': (4, 2, 1),
        'hidden': 512,
    },
    task={
        'environments': 4,
        'moves': 4,
        'replay': 50_000,
        'replay_start': 2_000,
        'discount': 0.99,
        'target_every': 500,
        'epsilon_end': 0.05,
        'epsilon_until': 0.25,
        'test_games': 20,
        'test_longest': 1_500,
        'test_epsilon': 0.05,
        # How the games are played, as `atari.Conventions` explains.
        'frame_skip': 4,
        'sticky': 0.25,
        'no_ops': 30,
        'longest': 27_000,
    },
)
# Dopamine's JaxDQNAgent with the Huber loss: 50 million moves, 200 million frames; tested as in
# Mnih et al. 2015.
_FULL = _ATARI.updated(
    {
        'preset': 'full',
        'steps': 12_500_000,
        'eval_every': 0.005,
        'optimizer': {'learning_rate': 6.25e-5},
        'task': {
            'environments': 1,
            'replay': 1_000_000,
            'replay_start': 20_000,
            'target_every': 2_000,
            'epsilon_end': 0.01,
            'epsilon_until': 0.005,
            'test_games': 30,
            'test_longest': 27_000,
        },
    }
)
_RECIPES = {'default': _DEFAULT, 'atari': _ATARI, 'full': _FULL}


class DQNWorkload(PresetRecipes):
    """Deep Q-learning; the metric is the mean return of whole games, played almost greedily.

    The preset `default` plays MinAtar's Breakout: a step is one move in each environment and one
    update. `atari`, which is small, and `full` play MsPacman: a step is `task.moves` moves and one
    update.
    """

    name = 'dqn'
    recipes = _RECIPES

    def data(self, recipe: Recipe, data_dir: Path | None) -> None:
        """There is none: the game makes it. A `ValueError` for an unknown game, or for a folder."""
        check_no_folder(recipe.data, data_dir)
        if _is_atari(recipe):
            check_game(recipe.data)
        else:
            Games(recipe.data)

    def task(self, recipe: Recipe, data: None = None) -> Task:
        """The training; a `ValueError` for an unknown game or numbers that do not fit together.

        In `recipe.task`, `epsilon_until` is a share of the steps, `replay` and `replay_start`
        (moves of random play before the first update) are transitions, `target_every` is updates.
        """
        return _atari_task(recipe) if _is_atari(recipe) else minatar_task(recipe)


def _is_atari(recipe: Recipe) -> bool:
    return 'frame_skip' in recipe.task


def _atari_task(recipe: Recipe) -> Task:
    """The training on an Atari game, which is played on the host."""
    atari.check_numbers(recipe)
    learning = DeepQLearning(recipe, SHAPE, count_actions(recipe))
    numbers: Any = recipe.task

    def evaluate_host(values, seed):
        returns = atari.returns(recipe, values, seed, numbers['test_epsilon'])
        return {'return': float(returns.mean())}

    def evaluate(params, state):
        raise AssertionError('Atari games are played on the host, by the feed')

    return Task(
        metric=Metric('return', 'high'),
        steps=recipe.steps,
        init=learning.init,
        init_state=target_network,
        loss=learning.loss,
        evaluate=evaluate,
        step=learning.update,
        feed=lambda seed: atari.AtariFeed(recipe, seed),
        values=learning.values,
        evaluate_host=evaluate_host,
    )
