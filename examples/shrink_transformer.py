"""Trains a character transformer, removes heads and hidden units until half of its FLOPs are left, and trains it on.

    python examples/shrink_transformer.py --data-dir folder  # with tinyshakespeare.txt: three seeds
    python examples/shrink_transformer.py --small            # a tiny model on the text inside CPython, seconds

Beside it stands a model that had the small shape from the beginning, and was trained for as many steps. `--out` gets a
JSON file for each seed. Ctrl-C loses no more than the seed that is being trained: the same command goes on.
"""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxpruner
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.files import atomic_files
from jaxpruner.progress import progress_bar
from oneshot_shakespeare_training import (
    RECIPE,
    SMALL,
    Text,
    Transformer,
    draw,
    read_text,
    windows,
)

REFUSED = 2  # the exit status of a program that was called wrongly
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
BUDGET = 'flops=0.5'
ROWS = {
    'dense': 'dense',
    'cut': 'cut to half the FLOPs',
    'tuned': 'cut, then trained on',
    'small': 'small from the beginning, trained as long',
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Removes half of a character transformer, and compares it with one that was small from the beginning."""

    data_dir: Path | None = None
    """Folder with tinyshakespeare.txt; none: the folder data/ in the one that JAXPRUNER_SHARED names."""
    out: Path = Path('out/shrink_transformer')
    """Folder for the results, a JSON file for each seed."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and batches."""
    steps: int = 1000
    """Of training before the cut."""
    tune_steps: int = 500
    """Of training after it."""
    small: bool = False
    """A tiny model and few steps, on the text inside CPython: shows that everything runs, and no more."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""

    def check(self) -> None:
        """Refuses wrong settings before any work, with a ValueError that names the value and the remedy."""
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f'--seeds must be different whole numbers from 0 on, got {self.seeds}')
        for flag, steps in {'--steps': self.steps, '--tune-steps': self.tune_steps}.items():
            if steps < 1:
                raise ValueError(f'{flag} must be at least 1, got {steps}')

    @property
    def name(self) -> str:
        """Of results with these settings."""
        size = 'small_' if self.small else ''
        return f'{size}{self.steps}_{self.tune_steps}'

    @property
    def recipe(self) -> Recipe:
        """The sizes of the model, and of its batches."""
        return SMALL if self.small else RECIPE.updated({'model': {'context': 64}})


class Experiment:
    """The models of one text.

    Attributes:
      recipe: sizes and batches.
      text: to train on, and to validate with.
      model: of the whole shape.
      tokens: inputs of the shape that models are trained with.
    """

    def __init__(self, settings: Settings, text: Text):
        sizes: Any = settings.recipe.model
        self.settings = settings
        self.recipe = settings.recipe
        self.text = text
        self.context = sizes['context']
        self.model = Transformer(text.symbols, **sizes)
        self.tokens = jnp.zeros((self.recipe.batch_size, self.context), jnp.int32)

    def apply(self, params: Any, tokens: jax.Array) -> Any:
        """The logits float[batch, characters, symbols] of the whole model."""
        return self.model.apply({'params': params}, tokens)

    def train(
        self, apply_fn: Callable[..., jax.Array], params: Any, steps: int, seed: int, name: str
    ) -> Any:
        """Trains parameters with AdamW, and with a rate that rises, and falls to nothing."""
        batch_size, context = self.recipe.batch_size, self.context
        warmup_steps = math.ceil(steps / 20)
        rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps, steps)
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
        )
        characters = jnp.asarray(self.text.train)

        @jax.jit
        def train_step(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
            batch = draw(characters, key, batch_size, context)
            gradients = jax.grad(lambda params: losses(apply_fn, params, batch).mean())(params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        key = jax.random.key(seed)
        with progress_bar(steps, self.settings.progress) as show:
            for step in range(steps):
                key_of_step = jax.random.fold_in(key, step)
                params, state = train_step(params, state, key_of_step)
                show(name, step + 1, params)
        return params

    def validate(self, apply_fn: Callable[..., jax.Array], params: Any) -> float:
        """The mean loss of the text that was held out, in nats a character."""
        batch_size = self.recipe.batch_size
        sequences = windows(self.text.validation, self.context)
        mean_loss = jax.jit(lambda params, batch: losses(apply_fn, params, batch).mean())
        count = len(sequences) // batch_size
        batches = np.split(sequences[: count * batch_size], count)
        means = [mean_loss(params, batch) for batch in batches]
        return float(np.mean(means))

    def run(self, seed: int) -> dict[str, Any]:
        """Trains the models of a seed; returns their losses, and what the cut leaves."""
        settings = self.settings
        variables = jax.jit(self.model.init)(jax.random.key(seed), self.tokens)
        start = variables['params']
        dense = self.train(self.apply, start, settings.steps, seed, 'dense')

        graph = jaxpruner.channel_groups(self.apply, dense, self.tokens)
        # Heads and hidden units go, the same share of both; the width and the features within a head stay.
        choice = graph.choose(dense, BUDGET, leave=('tokens/*', '*/attention/*/kernel[2]'))
        small_apply = graph.small_apply(choice.keep)
        cut = graph.shrink(dense, choice.keep)
        tuned = self.train(small_apply, cut, settings.tune_steps, seed + 1000, 'cut')

        # Its weights are drawn for the whole shape: a slice of them is a draw for the small one but for its scale.
        small_start = graph.shrink(start, choice.keep, verify=False)
        steps = settings.steps + settings.tune_steps
        small = self.train(small_apply, small_start, steps, seed, 'small')
        return {
            'loss': {
                'dense': self.validate(self.apply, dense),
                'cut': self.validate(small_apply, cut),
                'tuned': self.validate(small_apply, tuned),
                'small': self.validate(small_apply, small),
            },
            'kept': {name: len(indices) for name, indices in choice.keep.items()},
            'flops': graph.cost(choice.keep).flops / graph.cost().flops,
        }


def losses(apply_fn: Callable[..., jax.Array], params: Any, sequences: jax.Array) -> jax.Array:
    """The loss of each character of sequences int[batch, context + 1]."""
    logits = apply_fn(params, sequences[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:])


def report(results: Sequence[dict[str, Any]]) -> str:
    """A table of the losses, as Markdown."""
    lines = ['| | loss (nats a character) |', '|---|--:|']
    for key, name in ROWS.items():
        values = [result['loss'][key] for result in results]
        deviation = f' ± {np.std(values, ddof=1):.3f}' if len(values) > 1 else ''
        lines.append(f'| {name} | {np.mean(values):.3f}{deviation} |')
    return '\n'.join(lines)


def run(settings: Settings) -> None:
    """Trains what has no result yet, and prints the table."""
    data_dir = settings.data_dir
    shared = os.environ.get('JAXPRUNER_SHARED')
    if data_dir is None and shared and not settings.small:  # the small text lies in a package
        data_dir = Path(shared, 'data')
    experiment = Experiment(settings, read_text(settings.recipe, data_dir))
    results = []
    for seed in settings.seeds:
        path = settings.out / f'{settings.name}_{seed}.json'
        if not path.exists():
            text = json.dumps(experiment.run(seed))
            atomic_files.replace_file(path, lambda temporary, text=text: temporary.write_text(text))
        results.append(json.loads(path.read_text()))
    print(report(results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example with the arguments of a command line; returns the exit status."""
    try:
        settings = tyro.cli(Settings, description=__doc__, args=arguments)
        settings.check()
        run(settings)
    except (ValueError, OSError) as error:
        print(f'shrink_transformer.py: {error}', file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print('Interrupted. The same command goes on.')
        return INTERRUPTED
    return 0


if __name__ == '__main__':
    sys.exit(main())
