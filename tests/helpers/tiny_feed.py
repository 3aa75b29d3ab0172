"""A workload whose batches come from a feed that the test wrote: a linear model learns numbers from the host."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.baselines.recipe import Optimizer, Pruning, Recipe
from jaxpruner.baselines.task import Metric, Task

WIDTH = 8
RECIPE = Recipe(
    'tiny',
    steps=8,
    batch_size=8,
    eval_every=0.25,
    optimizer=Optimizer('adam', learning_rate=0.05),
    pruning=Pruning(frequency=0.2),
)


class TinyFeed:
    """Random numbers; its position is the state of NumPy's generator."""

    made = 0

    def __init__(self, seed, size, wants_values):
        type(self).made += 1
        self.random, self.size, self.wants_values = np.random.default_rng(seed), size, wants_values
        self.is_closed = False

    def next(self, values):
        inputs = self.random.normal(size=(self.size, WIDTH)).astype(np.float32)
        seen = (
            np.asarray(values(inputs))
            if self.wants_values
            else np.zeros((self.size, 2), np.float32)
        )
        return {'inputs': inputs, 'targets': inputs[:, :2] + 0.1 * seen}

    def state(self):
        text = json.dumps(self.random.bit_generator.state)
        return {'random': np.frombuffer(text.encode(), np.uint8)}

    def set_state(self, state):
        self.random.bit_generator.state = json.loads(state['random'].tobytes())

    def close(self):
        self.is_closed = True


class TinyWorkload:
    name = 'tiny'
    presets = ('default',)

    def __init__(self, wants_values=False, evaluates='here'):
        self.wants_values, self.evaluates = wants_values, evaluates

    def default(self, preset):
        return RECIPE

    def data(self, recipe, data_dir):
        return None

    def task(self, recipe, data):
        def values(params, state, inputs):
            return inputs.astype(recipe.dtype) @ params['kernel'].astype(recipe.dtype)

        def errors(params, batch):
            return (
                (values(params, None, batch['inputs']).astype(jnp.float32) - batch['targets']) ** 2
            ).mean(axis=-1)

        def evaluate(params, state):
            return {'error': jnp.abs(params['kernel'][:2] - jnp.eye(2)).sum()}

        def evaluate_host(values, seed):
            return {
                'error': float(
                    np.abs(values(np.eye(WIDTH, dtype=np.float32))[:2] - np.eye(2)).sum()
                )
                + seed
            }

        return Task(
            metric=Metric('error', 'low'),
            init=lambda key: {'kernel': jax.random.normal(key, (WIDTH, 2))},
            init_state=lambda params, key: jnp.int32(0),
            batch=lambda key, step: None,
            loss=lambda params, state, batch, key: (errors(params, batch).mean(), state + 1),
            evaluate=evaluate,
            feed=lambda seed: TinyFeed(seed, recipe.batch_size, self.wants_values),
            values=values,
            evaluate_host=evaluate_host if self.evaluates == 'host' else None,
        )
